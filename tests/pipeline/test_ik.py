"""ik_llama.cpp's quantizer: what it loses, how it reads, its own refusals."""

import importlib.util
import math
import subprocess
import sys

import numpy as np
import pytest

from pipeline.errors import QuantizeError, TypeRuleError
from pipeline.quant import ik as ik_module
from pipeline.quant.dequant import can_decode, dequantize
from pipeline.quant.error_limits import ERROR_LIMITS
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.guard import ABORTS_ON_HUGE, check_rows, max_magnitude
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import TYPES

# name -> most relative error on gaussian rows.
ERRORS = {
    "IQ6_K": 0.017,
    "Q6_0": 0.022,
    "IQ5_K": 0.034,
    "IQ5_KS": 0.039,
    "IQ4_K": 0.069,
    "IQ4_KS": 0.079,
    "IQ4_KSS": 0.11,
    "IQ4_KT": 0.106,
    "IQ3_K": 0.145,
    "IQ3_KS": 0.165,
    "IQ3_KT": 0.18,
    "IQ2_KL": 0.25,
    "IQ2_K": 0.31,
    "IQ2_KS": 0.36,
    "IQ2_KT": 0.355,
    "IQ1_KT": 0.47,
}
TRELLIS = {"IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"}
"""Their tables take seconds; one of them stands for the rest in the fast tests."""
SLOW = pytest.mark.slow
ALL = [pytest.param(n, marks=SLOW if n in TRELLIS - {"IQ1_KT"} else ()) for n in ERRORS]
READ_BY_BOTH = ["Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]

RNG = np.random.default_rng(11)
ROWS = RNG.normal(0, 0.02, (4, 512)).astype(np.float32)
IMPORTANCE = RNG.lognormal(0, 1.2, 512).astype(np.float32)


@pytest.fixture(scope="module")
def ik():
    return IkQuantizer()


def quantized(ik, name, rows, importance=None):
    out = np.full((len(rows), TYPES[name].row_nbytes(rows.shape[1])), 0xAA, np.uint8)
    ik.quantize(TYPES[name], rows, out, importance)
    return out


def lost(ik, name, rows, importance=None):
    decoded = dequantize(TYPES[name], quantized(ik, name, rows, importance), rows.shape[1])
    off, weights = decoded.astype(np.float64) - rows, 1 if importance is None else importance
    return math.sqrt((weights * off**2).sum() / (weights * rows.astype(np.float64) ** 2).sum())


def test_every_type_of_ik_is_tried():
    assert (
        set(ERRORS) == {t.name for t in TYPES.values() if t.family == "ik"} == IkQuantizer.written
    )


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_decodes_to_about_the_same(ik, name):
    ik.prepare([TYPES[name]])
    assert can_decode(TYPES[name])
    plain = lost(ik, name, ROWS)
    assert ERRORS[name] / 1.25 < plain <= ERRORS[name] < ERROR_LIMITS[name] / 1.7
    decoded = dequantize(TYPES[name], quantized(ik, name, ROWS, IMPORTANCE), 512)
    weighted = (IMPORTANCE * (decoded - ROWS) ** 2).sum()
    decoded = dequantize(TYPES[name], quantized(ik, name, ROWS), 512)
    assert weighted < 0.95 * (IMPORTANCE * (decoded - ROWS) ** 2).sum()


@pytest.mark.parametrize("name", ALL)
def test_rows_do_not_depend_on_their_neighbours(ik, name):
    whole = quantized(ik, name, ROWS)
    for number, row in enumerate(ROWS):
        np.testing.assert_array_equal(quantized(ik, name, row[None]), whole[number : number + 1])
    decoded = dequantize(TYPES[name], whole, 512)
    last = dequantize(TYPES[name], whole[3:], 512)
    np.testing.assert_array_equal(decoded[3:], last)


@pytest.mark.parametrize("name", READ_BY_BOTH)
def test_both_libraries_read_mainline_types_alike(ik, name):
    stored = np.empty((4, TYPES[name].row_nbytes(512)), np.uint8)
    GgmlQuantizer().quantize(TYPES[name], ROWS, stored, None)
    ours = dequantize(TYPES[name], stored, 512)
    assert np.abs(ours).max() > 0.01
    np.testing.assert_allclose(ik.dequantize(TYPES[name], stored, 512), ours, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_any_bytes_can_be_decoded(ik, name):
    stored = RNG.integers(0, 256, (8, TYPES[name].row_nbytes(512)), dtype=np.uint8)
    assert dequantize(TYPES[name], stored, 512).shape == (8, 512)


@pytest.mark.parametrize("name", ALL)
def test_at_its_limit_a_type_is_as_good_as_at_one(ik, name):
    top = ROWS / np.abs(ROWS).max()
    for importance in (None, IMPORTANCE, IMPORTANCE * np.float32(1e8)):
        limit = max_magnitude(TYPES[name], importance)
        limit = np.nextafter(np.float32(limit), np.float32(0))
        ordinary = lost(ik, name, top * np.float32(math.frexp(limit)[0]), importance)
        assert lost(ik, name, top * limit, importance) <= ordinary * 1.1


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(ik, name):
    rows = ROWS.copy()
    rows[1] = 0
    rows[2, :256] = 0
    decoded = dequantize(TYPES[name], quantized(ik, name, rows), 512)
    assert not decoded[1].any()
    assert np.abs(decoded[2, :256]).max() < 2e-3
    assert decoded[2, 256:].any()


@pytest.mark.parametrize("factor", [2.0**-32, 2.0**-10, 2.0**20])
@pytest.mark.parametrize("name", ["Q6_0", "IQ4_KS", "IQ1_KT"])
def test_a_common_factor_of_the_importance_does_not_matter(ik, name, factor):
    scaled = quantized(ik, name, ROWS, IMPORTANCE * np.float32(factor))
    np.testing.assert_array_equal(scaled, quantized(ik, name, ROWS, IMPORTANCE))


@pytest.mark.slow
def test_small_rows_of_all_sizes_do_not_end_the_process(ik):
    """IQ3_KT, without importance, on rows that its own search gives up."""
    rng = np.random.default_rng(1)
    for top in (1e-2, 1e-5, 1e-12, 1e-30) * 40:
        rows = rng.normal(size=(4, 512)) * np.repeat(10.0 ** rng.uniform(-12, 0, (4, 16)), 32, 1)
        rows = (rows / np.abs(rows).max(axis=1, keepdims=True) * top).astype(np.float32)
        rows[3] = 0
        decoded = dequantize(TYPES["IQ3_KT"], quantized(ik, "IQ3_KT", rows), 512) / top
        assert not decoded[3].any()
        assert np.linalg.norm(decoded - rows / top) < 0.5 * np.linalg.norm(rows / top)


@pytest.mark.slow
def test_raised_rows_have_the_bytes_of_the_library(ik, monkeypatch):
    rows = np.random.default_rng(2).normal(0, 0.02, (8, 512)).astype(np.float32)
    for importance in (None, IMPORTANCE):
        raised = quantized(ik, "IQ3_KT", rows, importance)
        with monkeypatch.context() as patch:
            patch.setattr(ik_module, "_RAISED", frozenset())
            np.testing.assert_array_equal(quantized(ik, "IQ3_KT", rows, importance), raised)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e28])
@pytest.mark.parametrize("name", sorted(ABORTS_ON_HUGE & set(ERRORS)))
def test_what_would_abort_is_refused_even_unchecked(ik, name, value):
    rows = ROWS.copy()
    rows[1, 3] = value
    with pytest.raises(TypeRuleError, match="too large"):
        quantized(ik, name, rows)


@pytest.mark.parametrize(
    "name", ["IQ2_KL", *(pytest.param(n, marks=SLOW) for n in ("IQ4_KSS", "IQ2_KT"))]
)
def test_the_guard_is_needed(name):
    """If a library comes that refuses by itself, the table of what aborts can shrink."""
    program = (
        "import numpy as np; from pipeline.quant.ik import IkQuantizer;"
        "from pipeline.quant.types import TYPES;"
        "IkQuantizer.always_measured = frozenset();"
        f"t = TYPES['{name}']; rows = np.ones((1, 256), np.float32); rows[0, 3] = np.inf;"
        "IkQuantizer().quantize(t, rows, np.empty((1, t.row_nbytes(256)), np.uint8), None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode < 0


@pytest.mark.parametrize("name", ["IQ2_K", "IQ4_KS"])
def test_what_would_be_stored_as_nan_is_refused_by_the_check(name):
    for value in (math.nan, math.inf, 2e5):
        rows = ROWS.copy()
        rows[1, 3] = value
        with pytest.raises(TypeRuleError, match="too large"):
            check_rows(TYPES[name], rows, importance=None, bound=value)


@pytest.mark.parametrize(
    "importance",
    [IMPORTANCE[:256], IMPORTANCE * 0, -IMPORTANCE, IMPORTANCE * np.float32(math.nan)],
    ids=["width", "zero", "negative", "nan"],
)
def test_unusable_importance_is_refused(ik, importance):
    with pytest.raises(TypeRuleError, match="importance vector"):
        quantized(ik, "IQ2_K", ROWS, importance)


@pytest.mark.parametrize("name", ["Q3_K", "TQ1_0", "F8_E4M3", "I32"])
def test_types_of_others_are_refused(ik, name):
    assert not ik.can_write(TYPES[name])
    with pytest.raises(QuantizeError, match=f"ik cannot write {name}"):
        quantized(ik, name, ROWS)
    with pytest.raises(QuantizeError, match=f"ik cannot write {name}"):
        ik.prepare([TYPES[name]])


def test_what_it_cannot_read_is_refused(ik):
    with pytest.raises(TypeRuleError, match="ik cannot read TQ1_0"):
        ik.dequantize(TYPES["TQ1_0"], np.zeros((1, 54), np.uint8), 256)
    with pytest.raises(TypeRuleError, match=r"140 bytes a row.*found 139"):
        dequantize(TYPES["IQ4_KS"], np.zeros((1, 139), np.uint8), 256)


@pytest.mark.parametrize(
    ("rows", "out", "named"),
    [
        (ROWS.astype(np.float64), np.empty((4, 276), np.uint8), "rows"),
        (np.asfortranarray(ROWS), np.empty((4, 276), np.uint8), "rows"),
        (ROWS, np.empty((4, 272), np.uint8), "out"),
        (ROWS, np.empty((4, 552), np.uint8)[:, ::2], "out"),
    ],
    ids=["f64 rows", "column order", "without the rows' meta", "strided out"],
)
def test_buffers_that_c_would_misread_are_refused(ik, rows, out, named):
    with pytest.raises(QuantizeError, match=f"^{named} is not the buffer"):
        ik.quantize(TYPES["IQ4_KS"], rows, out, None)


def test_the_eighth_argument_is_null(ik, monkeypatch):
    """The build here ignores it; where there is one, it is a pointer that is followed."""
    chunk, calls = ik._library.ggml_quantize_chunk, []
    assert len(chunk.argtypes) == 8

    class Recording:
        def ggml_quantize_chunk(self, *arguments):
            calls.append(arguments)
            return chunk(*arguments)

    monkeypatch.setattr(ik, "_library", Recording())
    out = np.empty((4, TYPES["IQ4_KS"].row_nbytes(512)), np.uint8)
    ik.quantize(TYPES["IQ4_KS"], ROWS, out, None)
    ((*_, seventh, eighth),) = calls
    assert (len(calls[0]), seventh, eighth) == (8, None, None)


def test_the_version_names_package_library_and_machine(ik):
    assert ik.name == "ik"
    package, library, machine = ik.version.split(", ")
    assert package.startswith("ik-llama-cpp-python ")
    assert len(library) == len("library ") + 12
    assert machine


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(QuantizeError, match=r"not installed.*pip install ik-llama-cpp-python"):
        IkQuantizer()
    assert not can_decode(TYPES["IQ4_KS"])
    assert can_decode(TYPES["Q3_K"])


@pytest.mark.slow
def test_what_it_says_while_building_tables_stays_out_of_stdout():
    program = (
        "from pipeline.quant.ik import IkQuantizer; from pipeline.quant.types import TYPES;"
        "print('before'); IkQuantizer().prepare([TYPES['IQ4_KT']]); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "before\nafter\n"
    assert "cluster" in done.stderr
