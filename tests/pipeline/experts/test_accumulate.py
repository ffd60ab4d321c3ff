"""The sums against a plain loop over every token and expert, and against figures by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import SourceError
from pipeline.experts.accumulate import accumulate, table_of
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.honesty import Honesty
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import Sum
from tests.pipeline.experts.tables import (
    HAND_IDS,
    HAND_OUTPUTS,
    hand_gates,
    hand_table,
    random_batch,
)


def plain_sums(ids, gates, outputs, n_experts):
    """Equation 9 of the paper as it reads: for each expert, all tokens that chose it."""
    sums = {name: np.zeros(n_experts) for name in Sum}
    for expert in range(n_experts):
        for token in range(len(ids)):
            for slot in range(ids.shape[1]):
                if ids[token, slot] == expert:
                    norm = sum(float(x) ** 2 for x in outputs[token, slot]) ** 0.5
                    sums[Sum.COUNTS][expert] += 1
                    sums[Sum.GATES][expert] += gates[token, slot]
                    sums[Sum.NORMS][expert] += norm
                    sums[Sum.WEIGHTED_NORMS][expert] += gates[token, slot] * norm
    return sums


def assert_close(found, expected, rtol=1e-12):
    np.testing.assert_array_equal(found[Sum.COUNTS], expected[Sum.COUNTS])
    for name in Sum:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=1e-12)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 999),
    n_tokens=st.integers(1, 20),
    top_k=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_sums_are_those_of_the_plain_loop(seed, n_tokens, top_k, more):
    routing = Routing(1, top_k + more, top_k, 1.5)
    batch = random_batch(seed, routing, n_tokens)
    found = accumulate(*batch, routing.n_experts).sums
    assert_close(found, plain_sums(*batch, routing.n_experts))
    assert found[Sum.COUNTS].sum() == top_k * n_tokens
    assert found[Sum.GATES].sum() == pytest.approx(1.5 * n_tokens)
    assert (found[Sum.WEIGHTED_NORMS] <= 1.5 * found[Sum.NORMS] + 1e-9).all()


BATCH = random_batch(5, Routing(1, 9, 3, 1.5), 30)
IDS, GATES, OUTPUTS = BATCH


T_IDS, T_GATES, T_OUTPUTS = map(torch.tensor, BATCH)
KINDS = {
    "torch f64": ((T_IDS, T_GATES, T_OUTPUTS), 1e-12),
    "torch f32": ((T_IDS.int(), T_GATES.float(), T_OUTPUTS.float()), 1e-5),
    "torch bf16": ((T_IDS, T_GATES.bfloat16(), T_OUTPUTS.bfloat16()), 2e-2),
    "numpy f32": ((IDS.astype("i4"), GATES.astype("f4"), OUTPUTS.astype("f4")), 1e-5),
    "norms": ((IDS, GATES, np.linalg.norm(OUTPUTS, axis=-1)), 1e-12),
    "torch norms": ((T_IDS, T_GATES, T_OUTPUTS.norm(dim=-1)), 1e-12),
    "with grad": ((T_IDS, T_GATES.clone().requires_grad_(), T_OUTPUTS), 1e-12),
}


@pytest.mark.parametrize(("batch", "rtol"), KINDS.values(), ids=KINDS)
def test_any_kind_of_array_gives_the_same(batch, rtol):
    assert_close(accumulate(*batch, 9).sums, plain_sums(*BATCH, 9), rtol)


def test_norms_of_16_bit_outputs_are_added_up_in_64_bits():
    outputs = torch.full((1, 1, 5120), 1.0078125, dtype=torch.bfloat16)
    sums = accumulate(torch.tensor([[0]]), torch.tensor([[1.0]]), outputs, 1).sums
    assert sums[Sum.NORMS][0] == pytest.approx(1.0078125 * 5120**0.5, rel=1e-14)


def test_batches_add_up():
    whole = accumulate(*BATCH, 9)
    parts = [
        accumulate(IDS[rows], GATES[rows], OUTPUTS[rows], 9) for rows in (slice(7), slice(7, 30))
    ]
    assert_close((parts[0] + parts[1]).sums, whole.sums)


def test_experts_that_no_token_chose_do_not_count():
    found = accumulate(*BATCH, 64).sums
    assert all((values[9:] == 0).all() for values in found.values())


HAND_ROWS = {
    Criterion.FREQUENCY: (2, 1, 3, 0),
    Criterion.EAN_MEAN: (3, 10, 6.6667, 0),
    Criterion.EAN_SUM: (6, 10, 20, 0),
    Criterion.WEIGHTED_FREQUENCY: (2.3766, 1.125, 0.9984, 0),
    Criterion.WEIGHTED_EAN_SUM: (6.7403, 11.25, 5.4789, 0),
    Criterion.REAP: (3.3701, 11.25, 1.8263, 0),
}


@pytest.mark.parametrize("criterion", Criterion)
def test_the_hand_example_has_the_scores_worked_out_by_hand(criterion):
    np.testing.assert_allclose(scores(hand_table(), criterion)[0], HAND_ROWS[criterion], atol=5e-5)


def test_the_gates_of_the_hand_example_are_those_worked_out_by_hand():
    expected = [[1.0909, 0.4091], [1.125, 0.375], [1.2857, 0.2143]]
    np.testing.assert_allclose(hand_gates(), expected, atol=5e-5)


def test_the_published_observer_gives_these_figures_for_its_own_gates():
    """Numbers of CerebrasResearch/reap tests/test_pruning_metrics.py: softmax, renormalised."""
    logits = np.array([[2.0, 1.0, 0.0], [1.0, 0.0, 2.0]])
    ids = np.array([[0, 1], [2, 0]])
    gates = np.take_along_axis(np.exp(logits), ids, 1)
    gates /= gates.sum(1, keepdims=True)
    outputs = np.array([[[3.0, 4.0], [0.0, 6.0]], [[7.0, 24.0], [8.0, 15.0]]])
    sums = accumulate(ids, gates, outputs, 3).sums
    assert sums[Sum.COUNTS].tolist() == [2, 1, 1]
    assert sums[Sum.NORMS].tolist() == [22, 6, 25]
    high, low = gates[0]
    expected = [5 * high + 17 * low, 6 * low, 25 * high]
    np.testing.assert_allclose(sums[Sum.WEIGHTED_NORMS], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("ids", "gates", "outputs", "message"),
    [
        ([[0, 4]], [[1, 1]], [[1, 1]], "does not have; expected 0 to 3; found 4"),
        ([[0, -1]], [[1, 1]], [[1, 1]], "does not have; expected 0 to 3; found -1"),
        ([[0, 1], [3, 3]], [[1, 1]] * 2, [[1, 1]] * 2, "token 1 uses expert 3 twice"),
        ([[0, 1]], [[1]], [[1, 1]], "do not fit together"),
        ([[0, 1]], [[1, 1]], [[[1, 1]]], "do not fit together"),
        ([0, 1], [1, 1], [1, 1], "do not fit together"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(ids, gates, outputs, message):
    with pytest.raises(SourceError, match=message):
        accumulate(np.array(ids), np.array(gates, float), np.array(outputs, float), 4)


def test_ids_that_are_no_integers_are_not_rounded():
    with pytest.raises(TypeError):
        accumulate(np.array([[0.5]]), np.array([[1.0]]), np.array([[1.0]]), 4)


def test_layers_become_a_table_that_knows_its_top_k():
    layer = accumulate(HAND_IDS, hand_gates(), HAND_OUTPUTS, 4)
    table = table_of([layer] * 3, [3] * 3, kind="own", honesty=Honesty.TRUE_GATE, origins=())
    assert (table.shape, table.tokens, table.top_k) == ((3, 4), (3, 3, 3), 2)
    with pytest.raises(SourceError, match="not given for each layer"):
        table_of([layer] * 2, [3] * 3, kind="own", honesty=Honesty.TRUE_GATE, origins=())
