"""Common experts of halves, lists and criteria, and the curves of a picture."""

import numpy as np
import pytest

from pipeline.errors import PlanError, SourceError
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.saliency import Sum
from pipeline.experts.select import select
from pipeline.experts.stability import compare_criteria, compare_halves, overlap, score_curves
from tests.pipeline.experts.tables import ROUTING, hand_table, random_table, table


def kept(seed, n_kept=5):
    return select(random_table(seed), Criterion.REAP, n_kept, ROUTING).keep


def test_overlap_counts_common_experts_layer_by_layer():
    one, other = kept(1), kept(2)
    expected = [len(set(a) & set(b)) / 5 for a, b in zip(one.layers, other.layers, strict=True)]
    assert overlap(one, other).tolist() == expected
    assert overlap(one, one).tolist() == [1, 1, 1]
    with pytest.raises(PlanError, match="different sizes"):
        overlap(one, kept(1, 6))


def test_halves_that_rank_alike_are_steady_and_others_are_not():
    one = table({"counts": [[9, 8, 1, 1], [1, 1, 9, 8]]})
    same = table({"counts": [[5, 5, 2, 2], [0, 0, 3, 3]]}, name="b")
    other = table({"counts": [[5, 0, 5, 0], [0, 0, 3, 3]]}, name="c")
    assert compare_halves((one, same), Criterion.FREQUENCY, 2).is_steady
    report = compare_halves((one, other), Criterion.FREQUENCY, 2)
    assert report.shares.tolist() == [0.5, 1]
    assert not report.is_steady
    with pytest.raises(SourceError, match="different shapes"):
        compare_halves((one, table({"counts": [[1, 2]]})), Criterion.FREQUENCY, 1)


def test_criteria_are_compared_with_each_other():
    report = compare_criteria(hand_table(), 2)
    assert report.criteria == tuple(Criterion)
    kept_by = [{0, 1}, {1, 2}, {1, 2}, {0, 1}, {0, 2}, {0, 1}]
    expected = [[len(a & b) / 2 for b in kept_by] for a in kept_by]
    assert report.shares.tolist() == expected
    counts_only = table({"counts": hand_table().sums[Sum.COUNTS]})
    assert compare_criteria(counts_only, 2).shares.tolist() == [[1]]


def test_curves_fall_and_show_the_cut():
    source = random_table(3)
    picture = score_curves(source, Criterion.REAP, 5)
    values = scores(source, Criterion.REAP)
    assert (np.diff(picture.curves, axis=1) <= 0).all()
    np.testing.assert_array_equal(np.sort(picture.curves), np.sort(values))
    layers = select(source, Criterion.REAP, 5, ROUTING).keep.layers
    for layer, ids in enumerate(layers):
        last = values[layer][list(ids)].min()
        first = max(values[layer][e] for e in range(12) if e not in ids)
        assert picture.curves[layer, 4:6].tolist() == [last, first]
        assert picture.gaps[layer] == pytest.approx(1 - first / last)


def test_a_cut_through_nothing_has_no_gap():
    assert score_curves(table({"counts": [[3, 0, 0]]}), Criterion.FREQUENCY, 2).gaps.tolist() == [0]
    assert score_curves(table({"counts": [[3, 1, 1]]}), Criterion.FREQUENCY, 3).gaps.tolist() == [0]
