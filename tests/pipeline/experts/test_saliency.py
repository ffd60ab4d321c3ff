"""What a table refuses, what its scores need, how tables are added."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import Problems, SourceError
from pipeline.experts.criterion import Criterion, criteria_of, scores, sums_for
from pipeline.experts.honesty import Honesty, weakest
from pipeline.experts.merge import merge
from pipeline.experts.saliency import Sum, count_top_k
from tests.pipeline.experts.tables import assert_same, random_table, table

COUNTS = [[2, 1, 3, 0], [2, 2, 1, 1]]
NORMS = [[6, 10, 20, 0], [1, 1, 1, 1]]


def changed(values, layer, expert, value):
    values = np.array(values, np.float64)
    values[layer, expert] = value
    return values


UNUSABLE = {
    "NaN": ({"norms": changed(NORMS, 1, 2, np.nan)}, "norms of layer 1, expert 2 is not a finite"),
    "infinity": ({"norms": changed(NORMS, 0, 3, np.inf)}, "norms of layer 0, expert 3 is not a f"),
    "negative": ({"gates": changed(NORMS, 1, 0, -1)}, "gates of layer 1, expert 0 is negative"),
    "half a token": ({"counts": changed(COUNTS, 0, 1, 1.5)}, "counts of layer 0, expert 1 is not"),
    "NaN count": ({"counts": changed(COUNTS, 0, 1, np.nan)}, "counts of layer 0, expert 1 is not"),
    "sum of nothing": (
        {"counts": COUNTS, "norms": changed(NORMS, 0, 3, 1)},
        "norms of layer 0, expert 3 is a sum over no token",
    ),
    "no sums": ({}, "not matrices of one shape"),
    "two shapes": ({"counts": COUNTS, "norms": [[1]]}, "not matrices of one shape"),
    "a vector": ({"counts": [1, 2]}, "not matrices of one shape"),
    "no layer": ({"counts": np.zeros((0, 4))}, "not matrices of one shape"),
}


@pytest.mark.parametrize(("sums", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_each_unusable_sum_is_refused_with_its_place(sums, message):
    with pytest.raises(SourceError, match=message):
        table(sums)


def test_all_unusable_sums_are_told_at_once():
    sums = {
        "counts": changed(COUNTS, 0, 0, -1),
        "norms": changed(changed(NORMS, 0, 0, -1), 1, 1, -2),
    }
    with pytest.raises(Problems, match="2 problems") as caught:
        table(sums)
    assert "norms of layer 0, expert 0 is negative (2 such values)" in str(caught.value)


def test_counts_must_add_up_in_every_layer():
    table({"counts": COUNTS}, tokens=(3, 3), top_k=2)
    with pytest.raises(SourceError, match=r"counts of layer 1 .* 2 experts a token.*8 for 4"):
        table({"counts": COUNTS}, tokens=(3, 4), top_k=2)
    with pytest.raises(SourceError, match="not given for each layer"):
        table({"counts": COUNTS}, tokens=(3,), top_k=2)


def test_counts_tell_the_top_k_only_where_all_layers_agree():
    counts = np.array(COUNTS, float)
    assert count_top_k(counts, (3, 3)) == 2
    assert count_top_k(counts, (3, 2)) is None
    assert count_top_k(counts, (4, 4)) is None
    assert count_top_k(counts, (0, 0)) is None


def test_every_criterion_has_the_sums_it_names():
    full = random_table(1)
    assert criteria_of(full) == tuple(Criterion)
    for criterion in Criterion:
        needed = sums_for(criterion)
        alone = table({name: full.sums[name] for name in needed})
        np.testing.assert_array_equal(scores(alone, criterion), scores(full, criterion))


@pytest.mark.parametrize("criterion", Criterion)
def test_a_criterion_without_its_sums_says_what_the_source_has(criterion):
    lacking = sums_for(criterion)[0]
    full = random_table(1)
    part = table({name: v for name, v in full.sums.items() if name != lacking}, name="observer.pt")
    with pytest.raises(SourceError, match=f"criterion {criterion} needs sums") as caught:
        scores(part, criterion)
    assert caught.value.expected == lacking
    assert caught.value.found == ", ".join(name for name in Sum if name != lacking)
    assert "observer.pt" in str(caught.value)
    assert criterion not in criteria_of(part)


def test_a_mean_needs_the_counts():
    with pytest.raises(SourceError, match=r"needs sums.* expected counts; found weighted"):
        scores(table({"weighted_norms": NORMS}), Criterion.REAP)


def test_experts_that_were_never_used_score_zero():
    never = table({"counts": [[0, 2]], "norms": [[0, 8]]})
    assert scores(never, Criterion.EAN_MEAN).tolist() == [[0, 4]]


def test_merging_is_measuring_on_all_texts():
    one, two = random_table(1, n_tokens=10), random_table(2, n_tokens=30)
    both = merge([one, two])
    for name in Sum:
        np.testing.assert_array_equal(both.sums[name], one.sums[name] + two.sums[name])
    assert (both.tokens, both.top_k) == ((40,) * 3, 2)
    assert both.origins == one.origins + two.origins
    mean = (scores(one, Criterion.REAP) + scores(two, Criterion.REAP)) / 2
    assert not np.allclose(scores(both, Criterion.REAP), mean)


@given(order=st.permutations(range(4)))
def test_the_order_of_merging_does_not_change_a_bit(order):
    tables = [random_table(seed) for seed in range(4)]
    assert_same(merge([tables[n] for n in order]), merge(tables))


def test_merging_keeps_what_all_have_and_the_weakest_label():
    true = random_table(1)
    proxy = table(
        {"counts": true.sums[Sum.COUNTS]}, honesty=Honesty.PROXY, name="p", kind="imatrix"
    )
    merged = merge([true, proxy])
    assert set(merged.sums) == {Sum.COUNTS}
    assert (merged.honesty, merged.kind) == (Honesty.PROXY, "imatrix+test")
    assert merged.tokens is None


def test_one_table_merged_is_itself():
    assert_same(merge([random_table(3)]), random_table(3))


REFUSED = {
    "none": ([], "no saliency"),
    "same file twice": ([random_table(1), random_table(1)], "count twice"),
    "shapes": ([random_table(1), table({"counts": COUNTS})], "different shapes"),
    "gates": (
        [random_table(1), random_table(2, honesty=Honesty.SOFTMAX_GATE)],
        "different gates; file 2; expected true-gate as in 1; found softmax-gate",
    ),
    "top-k": (
        [table({"counts": [[2]]}, top_k=2), table({"counts": [[2]]}, top_k=1, name="b")],
        "different top-k",
    ),
    "nothing in common": (
        [table({"counts": COUNTS}), table({"norms": NORMS}, name="b")],
        "no sum in common",
    ),
}


@pytest.mark.parametrize(("tables", "message"), REFUSED.values(), ids=REFUSED)
def test_tables_that_do_not_belong_together_are_refused(tables, message):
    with pytest.raises(SourceError, match=message):
        merge(tables)


@pytest.mark.parametrize("names", list(itertools.permutations("abc")))
def test_gates_differ_even_with_a_proxy_among_them(names):
    labels = (Honesty.TRUE_GATE, Honesty.SOFTMAX_GATE, Honesty.PROXY)
    tables = [
        random_table(n, name=name, honesty=label)
        for n, (name, label) in enumerate(zip(names, labels, strict=True))
    ]
    with pytest.raises(SourceError, match="different gates"):
        merge(tables)


def test_a_proxy_never_disappears():
    for label in Honesty:
        assert weakest([label, Honesty.PROXY]) is Honesty.PROXY
        assert weakest([Honesty.TRUE_GATE, label]) is label
