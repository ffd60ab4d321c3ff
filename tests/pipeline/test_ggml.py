"""The ggml quantizer against gguf-py's encoders and decoders, and its own refusals."""

import ctypes
import importlib.util
import math
import threading
from dataclasses import replace

import gguf
import numpy as np
import pytest

from pipeline.errors import QuantizeError, TypeRuleError
from pipeline.quant.dequant import dequantize
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.library import Package
from pipeline.quant.types import TYPES

RNG = np.random.default_rng(11)
ROWS = RNG.normal(0, 0.02, (4, 512)).astype(np.float32)
IMPORTANCE = np.exp(RNG.normal(size=512)).astype(np.float32)

# name -> most relative error on gaussian rows, with importance where the type asks for it.
ERRORS = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 4e-3,
    "Q8_0": 0.006,
    "Q6_K": 0.021,
    "Q5_K": 0.04,
    "Q5_1": 0.043,
    "Q5_0": 0.047,
    "Q4_K": 0.08,
    "Q4_1": 0.088,
    "Q4_0": 0.095,
    "IQ4_NL": 0.085,
    "IQ4_XS": 0.085,
    "MXFP4": 0.13,
    "NVFP4": 0.13,
    "Q3_K": 0.17,
    "IQ3_S": 0.18,
    "IQ3_XXS": 0.24,
    "Q2_K": 0.32,
    "IQ2_XXS": 0.42,
    "Q2_0": 0.85,
    "TQ1_0": 0.85,
    "TQ2_0": 0.85,
    "Q1_0": 0.65,
}
GGUF_PY_ENCODES = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
]


@pytest.fixture(scope="module")
def ggml():
    return GgmlQuantizer()


def quantized(ggml, name, rows, importance=None):
    out = np.full((len(rows), TYPES[name].row_nbytes(rows.shape[1])), 0xAA, np.uint8)
    ggml.quantize(TYPES[name], rows, out, importance)
    return out


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_written_decodes_to_about_the_same(ggml, name):
    importance = IMPORTANCE if name == "IQ2_XXS" else None
    ggml.prepare([TYPES[name]])
    decoded = dequantize(TYPES[name], quantized(ggml, name, ROWS, importance), 512)
    lost = np.linalg.norm(decoded - ROWS) / np.linalg.norm(ROWS)
    assert lost <= ERRORS[name]
    assert ERRORS[name] == 0 or lost > 0


@pytest.mark.parametrize("name", GGUF_PY_ENCODES)
def test_bytes_equal_those_of_gguf_py(ggml, name):
    rows = ROWS.copy()
    rows[0, :256] = 0
    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
    found = quantized(ggml, name, rows)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0", "Q8_K", "MXFP4", "NVFP4", "TQ1_0"])
def test_decoding_equals_ggmls_own(ggml, name):
    stored = RNG.integers(0, 256, (2, TYPES[name].row_nbytes(512)), dtype=np.uint8)
    if name == "Q8_K":
        stored.reshape(-1, 292)[:, :4] = np.frombuffer(np.float32(0.25).tobytes(), np.uint8)
    expected = np.empty((2, 512), np.float32)
    decode = getattr(ggml._library, f"dequantize_row_{TYPES[name].planner_name}")
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    decode(stored.ctypes.data, expected.ctypes.data, expected.size)
    # NVFP4's NaN scale decodes differently, and a random f16 scale may be infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        found = dequantize(TYPES[name], stored, 512)
    both = np.isfinite(expected) & np.isfinite(found)
    assert both.mean() > 0.5
    np.testing.assert_array_equal(found[both], expected[both])


def test_e4m3_codes():
    codes = np.array([[0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0xB8]], np.uint8)
    values = [[0.0, 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0, -1.0]]
    np.testing.assert_array_equal(dequantize(TYPES["F8_E4M3"], codes, 7), values)
    assert np.isnan(dequantize(TYPES["F8_E4M3"], np.array([[0x7F, 0xFF]], np.uint8), 2)).all()


@pytest.mark.parametrize(("name", "dtype"), [("I16", "<i2"), ("I64", "<i8"), ("F64", "<f8")])
def test_plain_numbers_decode_as_themselves(name, dtype):
    stored = np.array([[1, -2, 3]], dtype).view(np.uint8)
    np.testing.assert_array_equal(dequantize(TYPES[name], stored, 3), [[1, -2, 3]])


def test_q8_1_ignores_its_sum():
    block = np.zeros((1, 36), np.uint8)
    block[0, :4] = np.array([0.5, 99], "<f2").view(np.uint8)
    block[0, 4:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    np.testing.assert_array_equal(dequantize(TYPES["Q8_1"], block, 32), [np.arange(-16, 16) / 2])


def test_wrong_rows_are_not_decoded():
    with pytest.raises(TypeRuleError, match=r"110 bytes a row.*found 109"):
        dequantize(TYPES["Q3_K"], np.zeros((1, 109), np.uint8), 256)


def test_importance_changes_what_is_kept(ggml):
    weighted = dequantize(TYPES["Q3_K"], quantized(ggml, "Q3_K", ROWS, IMPORTANCE), 512)
    plain = dequantize(TYPES["Q3_K"], quantized(ggml, "Q3_K", ROWS), 512)

    def cost(decoded):
        return float((IMPORTANCE * (decoded - ROWS) ** 2).sum())

    assert cost(weighted) < cost(plain)


def test_tiles_and_threads_do_not_change_the_bytes(ggml):
    rows = RNG.normal(size=(16, 512)).astype(np.float32)
    whole = quantized(ggml, "Q4_K", rows)
    out = np.zeros_like(whole)
    threads = [
        threading.Thread(
            target=ggml.quantize, args=(TYPES["Q4_K"], rows[i : i + 4], out[i : i + 4], None)
        )
        for i in range(0, 16, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("F16", 70000.0),
        ("F16", math.nan),
        ("IQ3_S", math.nan),
        ("IQ3_S", math.inf),
        ("IQ3_XXS", 1e28),
    ],
)
def test_what_would_abort_or_overflow_is_refused_even_unchecked(ggml, name, value):
    rows = ROWS.copy()
    rows[1, 3] = value
    with pytest.raises(TypeRuleError, match="too large"):
        quantized(ggml, name, rows)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ2_XS", "IQ1_S"])
def test_missing_importance_does_not_end_the_process(ggml, name):
    with pytest.raises(TypeRuleError, match="needs an importance matrix"):
        quantized(ggml, name, ROWS)


@pytest.mark.parametrize("name", ["IQ4_KS", "F8_E4M3", "Q8_1", "I8"])
def test_types_without_encoder_are_refused(ggml, name):
    assert not ggml.can_write(TYPES[name])
    with pytest.raises(QuantizeError, match=f"cannot write {name}"):
        quantized(ggml, name, ROWS)
    with pytest.raises(QuantizeError, match=f"cannot write {name}"):
        ggml.prepare([TYPES[name]])


@pytest.mark.parametrize(
    ("rows", "out", "importance", "named"),
    [
        (ROWS.astype(np.float64), np.empty((4, 220), np.uint8), None, "rows"),
        (np.asfortranarray(ROWS), np.empty((4, 220), np.uint8), None, "rows"),
        (ROWS, np.empty((4, 219), np.uint8), None, "out"),
        (ROWS, np.empty((3, 220), np.uint8), None, "out"),
        (ROWS, np.empty((4, 440), np.uint8)[:, ::2], None, "out"),
        (ROWS, np.empty((4, 220), np.uint8), IMPORTANCE.astype(np.float64), "importance"),
    ],
    ids=["f64 rows", "column order", "narrow out", "short out", "strided out", "f64 importance"],
)
def test_buffers_that_c_would_misread_are_refused(ggml, rows, out, importance, named):
    with pytest.raises(QuantizeError, match=f"^{named} is not the buffer"):
        ggml.quantize(TYPES["Q3_K"], rows, out, importance)


def test_the_version_names_library_commit_and_machine(ggml):
    assert ggml.name == "ggml"
    assert ggml.version.startswith("libggml-python ")
    assert ggml._library.ggml_commit().decode() in ggml.version


def test_a_missing_library_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuantizeError, match=r"not installed.*pip install libggml-python"):
        GgmlQuantizer()


def test_a_broken_library_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "libggml-base.so"
    broken.write_bytes(b"\x7fELF nothing more")
    monkeypatch.setattr(Package, "path", lambda self: broken)
    with pytest.raises(QuantizeError, match=r"cannot be loaded.*libggml-base"):
        GgmlQuantizer()


def test_a_library_that_lacks_a_function_is_named(monkeypatch):
    monkeypatch.setattr(GgmlQuantizer, "signatures", {"ggml_no_such_thing": (None, [])})
    with pytest.raises(QuantizeError, match=r"cannot be loaded.*ggml_no_such_thing"):
        GgmlQuantizer()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"type_id": TYPES["Q4_K"].type_id}, "under another name.*q3_K.*q4_K"),
        ({"type_id": 4}, "under another name.*q3_K"),
        ({"block_nbytes": 112}, r"in rows of another size \(256 weights\).*112 bytes.*110 bytes"),
        ({"row_meta_nbytes": 4}, r"in rows of another size \(256 weights\).*114 bytes.*110 bytes"),
    ],
    ids=["another type", "a retired number", "another block", "meta bytes"],
)
def test_a_library_that_stores_a_type_otherwise_is_refused(ggml, changed, said):
    with pytest.raises(QuantizeError, match=f"stores Q3_K {said}.*another version of libggml"):
        ggml.prepare([replace(TYPES["Q3_K"], **changed)])
