"""Which experts stay."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PlanError, Problems, SourceError
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.notes import KERNEL_COUNTS, count_notes, is_fused
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import Sum
from pipeline.experts.select import select
from tests.pipeline.experts.tables import ROUTING, hand_table, random_table, table

HAND_ROUTING = Routing(1, 4, 2, 1.5)
HAND_KEEPS = {
    Criterion.FREQUENCY: (0, 2),
    Criterion.EAN_MEAN: (1, 2),
    Criterion.EAN_SUM: (1, 2),
    Criterion.WEIGHTED_FREQUENCY: (0, 1),
    Criterion.WEIGHTED_EAN_SUM: (0, 1),
    Criterion.REAP: (0, 1),
}


@pytest.mark.parametrize("criterion", Criterion)
def test_the_hand_example_keeps_what_was_worked_out_by_hand(criterion):
    selection = select(hand_table(), criterion, 2, HAND_ROUTING)
    assert selection.keep.layers == (HAND_KEEPS[criterion],)


SMALL = st.lists(
    st.lists(st.integers(0, 3), min_size=6, max_size=6).filter(any), min_size=2, max_size=2
)
"""Scores with many ties; no layer without any."""


def counted(values):
    return table({"counts": values})


@settings(max_examples=40)
@given(values=SMALL, n_kept=st.integers(2, 6))
def test_no_pruned_expert_is_better_and_of_equals_the_lower_id_stays(values, n_kept):
    keep = select(counted(values), Criterion.FREQUENCY, n_kept, Routing(2, 6, 2)).keep
    for row, ids in zip(values, keep.layers, strict=True):
        assert list(ids) == sorted(set(ids))
        assert len(ids) == n_kept
        for kept in ids:
            for pruned in set(range(6)) - set(ids):
                assert (row[kept], -kept) > (row[pruned], -pruned)


@settings(max_examples=40)
@given(values=SMALL, n_few=st.integers(2, 6), n_many=st.integers(2, 6))
def test_a_longer_list_holds_the_shorter(values, n_few, n_many):
    few, many = (
        select(counted(values), Criterion.FREQUENCY, n, Routing(2, 6, 2)).keep
        for n in sorted((n_few, n_many))
    )
    assert all(set(a) <= set(b) for a, b in zip(few.layers, many.layers, strict=True))


@settings(max_examples=30)
@given(seed=st.integers(0, 99), scale=st.floats(1e-3, 1e3), criterion=st.sampled_from(Criterion))
def test_a_common_factor_of_all_gates_changes_no_list(seed, scale, criterion):
    one = random_table(seed, honesty=Honesty.SOFTMAX_GATE)
    scaled = {
        name: values * (scale if name in (Sum.GATES, Sum.WEIGHTED_NORMS) else 1)
        for name, values in one.sums.items()
    }
    other = replace(one, sums=scaled)
    kept = [select(t, criterion, 5, ROUTING).keep.layers for t in (one, other)]
    assert kept[0] == kept[1]


def test_layers_are_ranked_apart():
    ids = select(counted([[9, 9, 1, 1], [1, 1, 2, 2]]), Criterion.FREQUENCY, 2, Routing(2, 4, 2))
    assert ids.keep.layers == ((0, 1), (2, 3))


def test_keeping_all_is_a_list_too():
    selection = select(random_table(1), Criterion.REAP, 12, ROUTING)
    assert selection.keep.layers == (tuple(range(12)),) * 3


@settings(max_examples=40)
@given(seed=st.integers(0, 50), forced=st.sets(st.integers(0, 11), max_size=4))
def test_forced_and_protected_experts_stay_and_the_rest_is_ranked(seed, forced):
    source = random_table(seed)
    values = scores(source, Criterion.REAP)
    selection = select(
        source, Criterion.REAP, 5, ROUTING, forced={1: forced}, protected={2: {11}, 1: {11}}
    )
    keep, plain = selection.keep, select(source, Criterion.REAP, 5, ROUTING).keep
    assert keep.layers[0] == plain.layers[0]
    assert 11 in keep.layers[2]
    held = forced | {11}
    others = sorted(set(range(12)) - held, key=lambda e: (-values[1][e], e))
    assert set(keep.layers[1]) == held | set(others[: 5 - len(held)])
    choice = keep.choices[0]
    assert choice.forced == tuple((1, e) for e in sorted(forced))
    assert choice.protected == ((1, 11), (2, 11))


def test_the_history_says_what_the_list_depends_on():
    source = random_table(4, honesty=Honesty.UNNORMALISED_GATE)
    (choice,) = select(source, Criterion.EAN_MEAN, 8, ROUTING).keep.choices
    assert (choice.kind, choice.honesty, choice.criterion) == (
        "test",
        Honesty.UNNORMALISED_GATE,
        Criterion.EAN_MEAN,
    )
    assert (choice.n_experts, choice.n_kept, choice.tokens) == (12, 8, 40)
    assert choice.origins == source.origins


GOOD = random_table(1)


def without_layer(layer):
    sums = {name: values.copy() for name, values in GOOD.sums.items()}
    for values in sums.values():
        values[layer] = 0
    tokens = [40] * 3
    tokens[layer] = 0
    return replace(GOOD, sums=sums, tokens=tuple(tokens))


def scaled(name, factor):
    return replace(GOOD, sums={**GOOD.sums, name: GOOD.sums[name] * factor})


MISFITS = {
    "a layer without statistics": (without_layer(1), ROUTING, "says nothing about layer 1"),
    "layers missing": (GOOD, replace(ROUTING, n_layers=5), "says nothing about layer 3, 4"),
    "layers beyond": (GOOD, replace(ROUTING, n_layers=2), "layer 2 is not in its trunk"),
    "other experts": (GOOD, replace(ROUTING, n_experts=13), "another number of experts; exp"),
    "other top-k": (GOOD, replace(ROUTING, top_k=3), "experts a token; expected 3; found 2"),
    "gates of a softmax": (GOOD, replace(ROUTING, gate_sum=1.6), "layer 0 do not add up to 1.6"),
    "gates too large": (
        GOOD,
        replace(ROUTING, gate_sum=0.1),
        "ask for gates that this model never",
    ),
    "weighted too large": (
        scaled(Sum.NORMS, 1e-3),
        ROUTING,
        "weighted_norms of layer 0, expert .* at most 1.5 times norms",
    ),
}


@pytest.mark.parametrize(("source", "routing", "message"), MISFITS.values(), ids=MISFITS)
def test_saliency_of_another_model_is_refused(source, routing, message):
    select(GOOD, Criterion.REAP, 5, ROUTING)
    with pytest.raises((PlanError, Problems), match=message):
        select(source, Criterion.REAP, 5, routing)


@pytest.mark.parametrize("label", [Honesty.SOFTMAX_GATE, Honesty.UNNORMALISED_GATE, Honesty.PROXY])
def test_only_gates_that_are_called_true_are_held_to_the_model(label):
    for source in (replace(GOOD, honesty=label), replace(scaled(Sum.NORMS, 1e-3), honesty=label)):
        select(source, Criterion.REAP, 5, replace(ROUTING, gate_sum=0.1))


@pytest.mark.parametrize(
    ("n_kept", "kept", "message"),
    [
        (1, {}, r"expected 2 \(used by a token\) to 12; found 1"),
        (13, {}, "cannot be kept; .*found 13"),
        (0, {}, "found 0"),
        (3, {0: {1, 2, 3, 4}}, "layer 0 is to keep more experts than stay.*4: 1, 2, 3, 4"),
        (3, {3: {0}}, "layer 3, expert 0 cannot be kept"),
        (3, {0: {12}}, "layer 0, expert 12 cannot be kept"),
        (3, {0: {-1}}, "layer 0, expert -1 cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_refused(n_kept, kept, message):
    for words in ({"forced": kept}, {"protected": kept}):
        with pytest.raises(PlanError, match=message):
            select(GOOD, Criterion.REAP, n_kept, ROUTING, **words)


def test_nothing_is_chosen_without_sums():
    with pytest.raises(SourceError, match="criterion reap needs sums"):
        select(table({"counts": GOOD.sums[Sum.COUNTS]}), Criterion.REAP, 5, ROUTING)


def test_engines_table_of_counts_is_told():
    assert len(KERNEL_COUNTS) == 15
    assert list(count_notes(256)) == []
    kernel, steps = count_notes(272)
    assert kernel == "vLLM has no routing kernel for 272 experts; it has one for 256 or 320."
    assert "272 experts in several steps" in steps
    assert [list(count_notes(n)) for n in (1, 2, 512, 576)] == [[]] * 4
    assert len(list(count_notes(288))) == 1
    assert len(list(count_notes(320))) == 1
    assert len(list(count_notes(577))) == 2


def test_llama_cpp_routes_powers_of_two_288_and_576_in_one_kernel():
    assert [n for n in range(1, 2000) if is_fused(n)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        288,
        512,
        576,
    ]


def notes(values, n_kept, **facts):
    values = np.array(values)
    source = table({"counts": values}, **facts)
    routing = Routing(len(values), values.shape[1], 2)
    return select(source, Criterion.FREQUENCY, n_kept, routing).notes


def test_never_routed_experts_and_ties_at_the_cut_are_told():
    assert notes([[4, 3, 2, 1]], 2) == ()
    never, tied = notes([[4, 0, 0, 0], [4, 3, 2, 0]], 2)
    assert never == "4 of 8 experts were never used by a token; 1 of them are kept."
    assert tied.startswith("In layer 0 the last kept and the first pruned expert score the same")
    assert notes([[4, 4, 2, 1]], 2) == ()
    assert notes([[2, 2, 2, 2]], 4) == ()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (Honesty.PROXY, "stand in for REAP"),
        (Honesty.SOFTMAX_GATE, "a softmax of the router's logits"),
        (Honesty.UNNORMALISED_GATE, "before the model normalises"),
    ],
)
def test_what_is_not_reap_is_told(label, words):
    (note,) = notes([[4, 3, 2, 1]], 2, honesty=label)
    assert words in note


def test_layers_that_saw_fewer_tokens_are_told():
    (note,) = notes([[4, 4, 2, 2], [1, 2, 3, 4]], 2, tokens=(6, 5), top_k=2)
    assert note.startswith("Layer 1 was measured on 5 tokens, others on up to 6")
