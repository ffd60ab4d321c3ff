"""One face for all quantizer libraries, which engines read a type, and what a type is fit for."""

import importlib.util
import threading

import numpy as np
import pytest

from pipeline.errors import QuantizeError
from pipeline.quant import dequant as dequant_module
from pipeline.quant import libraries as libraries_module
from pipeline.quant.dequant import dequantize
from pipeline.quant.fitness import (
    BETTER_WITHOUT_IMPORTANCE,
    LOOKUP_TYPES,
    advice,
    why_not_lookup,
)
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.libraries import Libraries
from pipeline.quant.readers import readers_of
from pipeline.quant.types import TYPES

ROWS = np.random.default_rng(5).normal(0, 0.02, (2, 512)).astype(np.float32)


@pytest.fixture
def without_ik(monkeypatch):
    """As if the optional package were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ik_llama_cpp" else find(name)
    )


def quantized(quantizer, name):
    out = np.empty((2, TYPES[name].row_nbytes(512)), np.uint8)
    quantizer.quantize(TYPES[name], ROWS, out, None)
    return out


def types(*names):
    return [TYPES[name] for name in names]


@pytest.mark.parametrize(
    ("name", "library"), [("Q3_K", GgmlQuantizer), ("IQ3_KS", IkQuantizer), ("BF16", GgmlQuantizer)]
)
def test_each_type_goes_to_its_own_library(name, library):
    libraries = Libraries()
    libraries.prepare(types(name))
    np.testing.assert_array_equal(quantized(libraries, name), quantized(library(), name))


def test_every_type_with_an_encoder_can_be_written():
    libraries = Libraries()
    written = {t.name for t in TYPES.values() if libraries.can_write(t)}
    assert written == GgmlQuantizer.written | IkQuantizer.written


def test_the_version_is_that_of_the_libraries_in_use():
    libraries, ggml, ik = Libraries(), GgmlQuantizer(), IkQuantizer()
    today = f"{ggml.name} {ggml.version}"
    assert f"{libraries.name} {libraries.version}" == today
    assert libraries.version_of([]) == libraries.version_of(types("Q3_K", "F32")) == today
    assert libraries.version_of(types("IQ2_K")) == f"ik {ik.version}"
    both = libraries.version_of(types("IQ2_K", "Q3_K", "IQ4_KS"))
    assert both == libraries.version_of(types("Q8_0", "IQ4_KS")) == f"{today}; ik {ik.version}"


def test_mainline_types_need_no_ik(without_ik):
    libraries = Libraries()
    libraries.prepare(types("Q3_K"))
    assert quantized(libraries, "Q3_K").any()
    assert libraries.can_write(TYPES["IQ2_K"])


@pytest.mark.parametrize(
    "use",
    [
        lambda libraries: libraries.prepare(types("Q3_K", "IQ2_K")),
        lambda libraries: quantized(libraries, "IQ2_K"),
        lambda libraries: libraries.version_of(types("IQ2_K")),
        lambda libraries: dequantize(TYPES["IQ2_K"], np.zeros((1, 76), np.uint8), 256),
    ],
    ids=["prepare", "quantize", "version_of", "dequantize"],
)
def test_a_missing_package_is_named_with_its_extra(without_ik, use):
    dequant_module._ik.cache_clear()
    with pytest.raises(QuantizeError, match=r"ik_llama\.cpp.*pip install ik-llama-cpp-python"):
        use(Libraries())


def test_threads_open_the_optional_library_once(monkeypatch):
    opened = []

    class Counted(IkQuantizer):
        def __init__(self):
            opened.append(self)
            super().__init__()

    monkeypatch.setattr(libraries_module, "IkQuantizer", Counted)
    libraries = Libraries()
    assert not opened
    threads = [threading.Thread(target=quantized, args=(libraries, "IQ2_K")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


@pytest.mark.parametrize("name", ["Q8_1", "I32", "F8_E4M3"])
def test_types_without_encoder_are_refused(name):
    assert not Libraries().can_write(TYPES[name])
    with pytest.raises(QuantizeError, match=f"cannot write {name}"):
        Libraries().prepare(types("Q3_K", name))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["F32", "Q3_K", "MXFP4", "I32"], "llama.cpp and ik_llama.cpp"),
        (["Q3_K", "IQ3_KS", "IQ2_K"], "ik_llama.cpp only (IQ3_KS, IQ2_K not read by llama.cpp)"),
        (["NVFP4", "Q3_K"], "llama.cpp only (NVFP4 not read by ik_llama.cpp)"),
        (
            ["IQ2_K", "TQ1_0"],
            "no engine (IQ2_K not read by llama.cpp; TQ1_0 not read by ik_llama.cpp)",
        ),
    ],
)
def test_who_reads_a_file(names, sentence):
    assert readers_of(types(*names, names[0])) == sentence


def test_what_may_be_looked_up():
    refused = {t.name for t in TYPES.values() if why_not_lookup(t)}
    assert refused == set(NEEDS_IMPORTANCE) | {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
    assert LOOKUP_TYPES["ik"] >= IkQuantizer.written
    assert LOOKUP_TYPES["mainline"] >= GgmlQuantizer.written
    assert not LOOKUP_TYPES["mainline"] & IkQuantizer.written
    assert why_not_lookup(TYPES["IQ2_XXS"]) == (
        "a table that is looked up by row gets no importance matrix, and its kernel ends the "
        "process without one"
    )


def test_advice_against_a_type():
    assert "loses to Q3_K" in advice(TYPES["IQ3_S"], weighted=False)
    assert advice(TYPES["IQ3_S"], weighted=True) is None
    assert "models trained" in advice(TYPES["TQ1_0"], weighted=True)
    assert advice(TYPES["Q3_K"], weighted=False) is None


@pytest.mark.parametrize("name", BETTER_WITHOUT_IMPORTANCE)
def test_the_better_type_is_no_larger_and_loses_less(name):
    better = BETTER_WITHOUT_IMPORTANCE[name].name
    assert TYPES[better].bpw <= TYPES[name].bpw

    def lost(of):
        return np.linalg.norm(dequantize(TYPES[of], quantized(Libraries(), of), 512) - ROWS)

    assert lost(better) < lost(name)
