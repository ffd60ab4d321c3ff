"""The measured speeds of the types, and what a plan makes of them."""

import pytest

from pipeline.quant.guard import ABORTS_WITHOUT_IMPORTANCE
from pipeline.quant.libraries import Libraries
from pipeline.quant.speed import cpu_seconds, speeds
from pipeline.quant.types import TYPES

EXPERT_WEIGHTS = 543_581_798_400


def test_every_type_that_is_written_was_measured():
    libraries = Libraries()
    assert set(speeds().of) == {t.name for t in TYPES.values() if libraries.can_write(t)}
    assert "family" in speeds().machine


def test_only_what_needs_importance_has_no_plain_speed():
    unmeasured = {name for name, speed in speeds().of.items() if speed.plain is None}
    assert unmeasured == ABORTS_WITHOUT_IMPORTANCE


@pytest.mark.parametrize(
    ("fast", "slow", "times"),
    [("Q8_0", "Q3_K", 1.3), ("Q3_K", "Q4_K", 3), ("Q3_K", "IQ3_S", 10), ("IQ3_K", "IQ3_KT", 5)],
)
def test_slow_types_are_told_from_fast_ones(fast, slow, times):
    of = speeds().of
    assert of[fast].plain > times * of[slow].plain


def test_seconds_follow_from_the_table():
    q3_k = TYPES["Q3_K"]
    assert cpu_seconds(q3_k, speeds().of["Q3_K"].plain * 2, weighted=False) == 2
    assert cpu_seconds(q3_k, 0, weighted=False) == 0
    plain = cpu_seconds(q3_k, EXPERT_WEIGHTS, weighted=False)
    assert 2 * plain < cpu_seconds(q3_k, EXPERT_WEIGHTS, weighted=True) < 10 * plain
    assert 3600 < plain < 36_000


def test_days_are_told():
    trellis = cpu_seconds(TYPES["IQ3_KT"], EXPERT_WEIGHTS, weighted=True)
    assert trellis > 3 * 24 * 3600


@pytest.mark.parametrize(("name", "weighted"), [("IQ2_XXS", False), ("I32", True)])
def test_what_was_not_measured_has_no_time(name, weighted):
    assert cpu_seconds(TYPES[name], 1000, weighted=weighted) is None
