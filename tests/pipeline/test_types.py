"""The type table against gguf-py, libggml and ik_llama.cpp's library."""

import ctypes

import gguf
import pytest

from pipeline.errors import TypeRuleError
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import TYPES, TYPES_BY_ID, find_type

MAINLINE = [t for t in TYPES.values() if t.family == "mainline"]
IN_LIBRARY = [t for t in MAINLINE if t.name != "F8_E4M3"]


IK = [t for t in TYPES.values() if t.family == "ik"]
UNKNOWN_TO_IK = {"TQ1_0", "TQ2_0", "NVFP4", "Q2_0", "Q1_0"}
"""Q1_0 it reads under another name."""


def opened(quantizer):
    library = ctypes.CDLL(str(quantizer.package.path()))
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.ggml_type_name.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library():
    library = opened(GgmlQuantizer)
    library.ggml_blck_size.restype = ctypes.c_int64
    return library


@pytest.fixture(scope="module")
def ik_library():
    library = opened(IkQuantizer)
    library.ggml_blck_size.restype = ctypes.c_int
    return library


@pytest.mark.parametrize("name", [t.name for t in gguf.GGML_QUANT_SIZES if t.name != "Q8_1"])
def test_every_gguf_py_type_is_known_with_its_sizes(name):
    number = gguf.GGMLQuantizationType[name]
    ours = TYPES[name]
    assert ours.type_id == number
    assert (ours.block, ours.block_nbytes) == gguf.GGML_QUANT_SIZES[number]


def assert_same(library, ours):
    assert ours.block == library.ggml_blck_size(ours.type_id)
    for n_cols in (ours.block, 2 * ours.block, 5120, 2304, 20480):
        if n_cols % ours.block == 0:
            assert ours.row_nbytes(n_cols) == library.ggml_row_size(ours.type_id, n_cols)
    assert ours.planner_name == library.ggml_type_name(ours.type_id).decode()


@pytest.mark.parametrize("ours", IN_LIBRARY, ids=lambda t: t.name)
def test_mainline_rows_are_libggml_rows(library, ours):
    assert_same(library, ours)


@pytest.mark.parametrize("ours", IK, ids=lambda t: t.name)
def test_ik_rows_are_its_library_s_rows(ik_library, ours):
    assert_same(ik_library, ours)


@pytest.mark.parametrize(
    "ours", [t for t in IN_LIBRARY if t.name not in UNKNOWN_TO_IK], ids=lambda t: t.name
)
def test_ik_has_the_mainline_types_under_the_same_numbers(ik_library, ours):
    # Its Q8_1 and Q8_K carry other sums; neither is ever in a file.
    if ours.name not in ("Q8_1", "Q8_K"):
        assert_same(ik_library, ours)


@pytest.mark.parametrize(
    ("name", "n_cols", "nbytes"),
    [
        ("IQ4_KS", 256, 140),
        ("IQ2_KT", 256, 72),
        ("IQ4_KSS", 5120, 2564),
        ("IQ2_KS", 5120, 1402),
        ("IQ3_KS", 5120, 2042),
        ("IQ2_KL", 5120, 1722),
        ("IQ1_KT", 2304, 508),
        ("IQ6_K", 256, 212),
        ("Q6_0", 64, 52),
    ],
)
def test_ik_rows_carry_their_meta_bytes(name, n_cols, nbytes):
    assert TYPES[name].row_nbytes(n_cols) == nbytes


@pytest.mark.parametrize(
    ("name", "bpw", "planner_name"),
    [
        ("Q3_K", 3.4375, "q3_K"),
        ("F32", 32, "f32"),
        ("MXFP4", 4.25, "mxfp4"),
        ("IQ2_XXS", 2.0625, "iq2_xxs"),
        ("Q2_0", 2.25, "q2_0"),
        ("IQ4_KS", 4.25, "iq4_ks"),
        ("IQ2_K", 2.375, "iq2_k"),
        ("F8_E4M3", 8, "f8_e4m3"),
    ],
)
def test_names_and_nominal_bits(name, bpw, planner_name):
    assert (TYPES[name].bpw, TYPES[name].planner_name) == (bpw, planner_name)


def test_ids_are_unique():
    assert len(TYPES_BY_ID) == len(TYPES)


@pytest.mark.parametrize("n_cols", [200, 0, -256])
def test_a_row_the_block_does_not_divide_is_refused(n_cols):
    with pytest.raises(TypeRuleError, match=f"block of Q4_K.*multiple of 256.*{n_cols}"):
        TYPES["Q4_K"].row_nbytes(n_cols)


def test_either_case_finds_a_type():
    assert find_type("q3_K") is find_type("Q3_k") is TYPES["Q3_K"]


@pytest.mark.parametrize(
    ("name", "hint"), [("Q3K", "Did you mean .*Q3_K"), ("zzz", "Known types: F32")]
)
def test_an_unknown_name_gets_a_hint(name, hint):
    with pytest.raises(TypeRuleError, match=hint):
        find_type(name)
