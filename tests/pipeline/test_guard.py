"""What is refused before ggml would abort or write garbage."""

import math

import numpy as np
import pytest

from pipeline.errors import QuantizeError, TypeRuleError
from pipeline.quant.dequant import dequantize
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.guard import (
    ABORTS_WITHOUT_IMPORTANCE,
    NEEDS_IMPORTANCE,
    check_rows,
    check_writable,
    max_magnitude,
)
from pipeline.quant.types import TYPES

ROWS = np.ones((2, 256), np.float32)
EVEN = np.ones(256, np.float32)
INF, NAN = math.inf, math.nan

# Types whose tables take seconds to build stay out of the measured limits below.
MEASURED = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "IQ3_XXS",
    "IQ3_S",
    "MXFP4",
    "NVFP4",
    "Q1_0",
    "Q2_0",
    "TQ1_0",
    "TQ2_0",
]


def relative_error(name, rows, importance=None):
    ggml = GgmlQuantizer()
    out = np.empty((len(rows), TYPES[name].row_nbytes(rows.shape[1])), np.uint8)
    ggml.quantize(TYPES[name], rows, out, importance)
    exact = rows.astype(np.float64)
    lost = dequantize(TYPES[name], out, rows.shape[1]) - exact
    return math.sqrt((lost**2).sum() / (exact**2).sum())


def just_below(limit):
    return float(np.nextafter(np.float32(limit), np.float32(0)))


def rows_up_to(magnitude):
    """Rows of several kinds whose largest |x| is ``magnitude``, to the last bit."""
    rows = np.random.default_rng(7).normal(size=(4, 512))
    rows /= np.abs(rows).max()
    rows[2] = np.where(np.arange(512) % 2, 1, -1)
    rows[3] = rows[3] * 1e-3
    rows[3, ::256] = -1
    return np.clip(rows * magnitude, -magnitude, magnitude).astype(np.float32)


@pytest.mark.parametrize("name", MEASURED)
def test_at_its_limit_a_type_is_as_good_as_at_one(name):
    limit = just_below(max_magnitude(TYPES[name]))
    # The same mantissas, so that power-of-two scales fall alike.
    ordinary = relative_error(name, rows_up_to(math.frexp(limit)[0]))
    assert relative_error(name, rows_up_to(limit)) <= ordinary * 1.2 + 1e-3


@pytest.mark.parametrize("scale", [1e-11, 1.0, 1e9])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "IQ3_S"])
def test_at_the_limit_with_importance_too(name, scale):
    importance = np.exp(np.random.default_rng(3).normal(size=512)).astype(np.float32)
    importance *= np.float32(scale) / importance.max()
    limit = just_below(max_magnitude(TYPES[name], importance))
    ordinary = relative_error(
        name, rows_up_to(math.frexp(limit)[0]), importance / np.float32(scale)
    )
    assert relative_error(name, rows_up_to(limit), importance) <= ordinary * 1.2 + 1e-3


@pytest.mark.parametrize("name", ["Q1_0", "TQ1_0", "Q2_0", "F16"])
def test_the_limit_is_real(name):
    above = np.nextafter(np.float32(65520), np.float32(INF))
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.float16(above))
    with pytest.raises(TypeRuleError, match=rf"too large for {name}.*tensor blk\.0\.x.*65504"):
        check_rows(TYPES[name], ROWS * above, importance=None, bound=float(above), tensor="blk.0.x")


@pytest.mark.parametrize(
    ("name", "value", "bound", "ok"),
    [
        ("Q3_K", 1.0, 1.0, True),
        ("Q3_K", 1.0, 1e9, True),
        ("Q3_K", 1.0, NAN, True),
        ("Q3_K", 1.0, INF, True),
        ("Q3_K", 2e5, 2e5, False),
        ("Q3_K", NAN, NAN, False),
        ("IQ3_S", INF, INF, False),
        ("IQ3_S", -1e28, 1e28, False),
        ("F16", 65504.0, 65504.0, True),
        ("F16", 70000.0, 70000.0, False),
        ("F16", -70000.0, 70000.0, False),
        ("BF16", 3.4e38, 3.4e38, False),
        ("F32", 3.4e38, 3.4e38, True),
        ("F32", NAN, NAN, False),
        ("MXFP4", 1e38, 1e38, True),
        ("NVFP4", 3000.0, 3000.0, False),
    ],
)
def test_magnitude(name, value, bound, ok):
    rows = ROWS.copy()
    rows[1, 17] = value
    if ok:
        check_rows(TYPES[name], rows, importance=None, bound=bound)
        return
    with pytest.raises(TypeRuleError, match="tensor out"):
        check_rows(TYPES[name], rows, importance=None, bound=bound, tensor="out")


def test_a_small_bound_spares_the_rows():
    # The bound is a promise; that the rows are not read shows in a broken one.
    check_rows(TYPES["Q3_K"], ROWS * np.float32(1e20), importance=None, bound=1.0)


@pytest.mark.parametrize("name", sorted(ABORTS_WITHOUT_IMPORTANCE))
def test_missing_importance_is_refused_where_the_kernel_aborts(name):
    with pytest.raises(TypeRuleError, match=f"{name} needs an importance matrix.*tensor t"):
        check_rows(TYPES[name], ROWS, importance=None, bound=1.0, tensor="t")
    check_rows(TYPES[name], ROWS, importance=EVEN, bound=1.0, tensor="t")


def test_the_types_that_need_importance_are_known_types():
    assert set(NEEDS_IMPORTANCE) <= set(TYPES)
    assert {"IQ3_XXS", "IQ2_S", "IQ1_M"} <= set(NEEDS_IMPORTANCE) - ABORTS_WITHOUT_IMPORTANCE


@pytest.mark.parametrize(
    "importance",
    [EVEN[:255], EVEN[None], EVEN * 0, -EVEN, EVEN * NAN, EVEN * INF, EVEN * 1e-15, EVEN * 1e20],
    ids=["width", "two dims", "zero", "negative", "nan", "inf", "tiny", "huge"],
)
def test_unusable_importance_is_refused(importance):
    with pytest.raises(TypeRuleError, match=r"importance vector.*tensor t"):
        check_rows(TYPES["Q3_K"], ROWS, importance=importance, bound=1.0, tensor="t")


def test_one_zero_or_nan_among_good_weights_is_refused():
    for value in (0.0, NAN):
        importance = EVEN.copy()
        importance[100] = value
        with pytest.raises(TypeRuleError, match="importance vector"):
            check_rows(TYPES["Q3_K"], ROWS, importance=importance, bound=1.0)


def test_a_row_the_block_does_not_divide_is_refused_by_name():
    with pytest.raises(TypeRuleError, match=r"block of Q4_K.*tensor t.*multiple of 256.*200"):
        check_rows(
            TYPES["Q4_K"], np.ones((1, 200), np.float32), importance=None, bound=1.0, tensor="t"
        )


@pytest.mark.parametrize("name", ["Q8_1", "I32", "F8_E4M3", "IQ4_KS"])
def test_a_type_without_encoder_is_refused(name):
    with pytest.raises(QuantizeError, match=f"ggml cannot write {name}; tensor t"):
        check_writable(GgmlQuantizer(), TYPES[name], tensor="t")
