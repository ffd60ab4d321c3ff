"""Rules of the pass that a whole model shows only by chance: ties, limits, zeros."""

import math

import numpy as np
import pytest
import torch

from pipeline.forward import compression, engram, head, indexer, moe, rope
from pipeline.model.config import CandidateConfig
from tests.pipeline.observe.observing import arithmetic_of, observed, some_tokens
from tests.pipeline.released_plans import released_config
from tests.reference.hyperparameters import Candidates
from tests.reference.indexer import best as reference_best
from tests.reference.indexer import candidate_rows

RELEASED = released_config("v4.1-flash")


def test_the_released_frequencies():
    """Pairs 0 to 15 keep theirs, 25 to 31 turn sixteen times slower; window layers keep all."""
    window, compressed = (rope.frequencies(RELEASED, ratio) for ratio in (0, 2))
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    assert window.tolist() == pytest.approx([10000.0 ** (-2 * i / 64) for i in range(32)])
    assert compressed[:16].tolist() == pytest.approx(plain[:16])
    assert compressed[25:].tolist() == pytest.approx([rate / 16 for rate in plain[25:]])
    assert plain[16] / compressed[16].item() == pytest.approx(1.103, abs=1e-3)


def test_turning_back_undoes_turning():
    x = torch.randn(5, 3, 10, dtype=torch.float64)
    by = rope.turns(torch.arange(5) * 7, torch.tensor([1.0, 0.1, 0.01]).double(), x.dtype)
    turned = rope.rotate(x, by)
    assert torch.equal(turned[..., :4], x[..., :4])
    assert torch.allclose(rope.rotate(turned, by, inverse=True), x)
    # Neighbours are a pair, and the first position does not turn.
    lengths = [one[..., 4:].pow(2).view(5, 3, 3, 2).sum(-1) for one in (turned, x)]
    assert torch.allclose(*lengths)
    assert torch.equal(turned[0], x[0])
    assert (turned[1:, :, 4:] != x[1:, :, 4:]).all()


@pytest.mark.parametrize("seed", range(4))
def test_picks_and_candidates_of_equal_scores(seed):
    """Scores of a few values only: nearly all are ties."""
    random = np.random.default_rng(seed)
    n_tokens, n_rows, ratio = 23, 11, 2
    wanted = random.integers(0, 3, (n_tokens, n_rows)).astype(np.float64)
    wanted[random.random(wanted.shape) < 0.2] = -np.inf
    finished = compression.finished(torch.arange(n_tokens), n_rows, ratio)
    picked = indexer.best(torch.from_numpy(wanted), finished, 4)
    assert picked.shape == (n_tokens, 4)
    found = torch.zeros(n_tokens, n_rows + 1, dtype=torch.bool)
    found.scatter_(1, torch.where(picked < 0, n_rows, picked), value=True)
    ours = found[:, :n_rows].numpy()
    assert np.array_equal(ours, reference_best(wanted, finished.numpy(), 4))
    blocks = indexer.candidate_blocks(
        torch.from_numpy(wanted), finished, CandidateConfig(source_layer=0, block_size=3, top_k=2)
    )
    rows = indexer.rows_of_blocks(blocks, n_rows, CandidateConfig(0, 3, 2))
    reference = candidate_rows(wanted, finished.numpy(), Candidates(source=0, block=3, count=2))
    assert np.array_equal(rows.numpy(), reference)


def test_of_equal_experts_the_lower_number_is_chosen(model):
    weights = moe.RouterWeights(torch.zeros(6, 8), torch.zeros(6))
    chosen = moe.route(torch.ones(3, 8), weights, model.config)
    assert chosen.experts.tolist() == [[0, 1]] * 3
    assert chosen.gates.tolist() == [[0.75, 0.75]] * 3


def test_the_bias_chooses_and_does_not_weigh(model):
    """Scores and bias of the figures by hand in the tests of the sums."""
    scores = torch.tensor([[0.8, 0.4, 0.3, 0.2]], dtype=torch.float64)
    logits = torch.expm1(scores**2).log()
    bias = torch.tensor([0, 0, 0.3, 0], dtype=torch.float64)
    weights = moe.RouterWeights(logits.T, bias)
    chosen = moe.route(torch.ones(1, 1, dtype=torch.float64), weights, model.config)
    assert chosen.experts.tolist() == [[0, 2]]
    assert chosen.gates[0].tolist() == pytest.approx([1.0909, 0.4091], abs=1e-4)


def test_an_expert_is_limited_on_its_own_sides():
    eye = torch.eye(1)
    weights = moe.ExpertWeights(torch.cat([eye, eye]), eye)

    def silu(x):
        return x / (1 + math.exp(-x))

    values = {20.0: silu(10) * 10, -20.0: silu(-20) * -10, 3.0: silu(3) * 3}
    for x, wanted in values.items():
        assert moe.expert(torch.tensor([[x]]), weights, 10).item() == pytest.approx(wanted)


def test_the_engram_opens_a_little_for_a_product_of_zero(model):
    config = model.config
    streams = torch.zeros(1, config.hc_mult, config.hidden)
    wkv = torch.zeros((config.hc_mult + 1) * config.hidden, 3)
    wkv[-config.hidden :] = 1
    gains = torch.ones(config.hc_mult, config.hidden)
    after = engram.written(streams, torch.ones(1, 3), engram.EngramWeights(wkv, gains), config)
    assert torch.allclose(after, torch.full_like(after, 3 / (1 + math.exp(-1e-3))))


@pytest.mark.parametrize("n_rows", [1, 7, 100])
def test_likelihoods_do_not_depend_on_how_the_head_is_cut(n_rows):
    normed, matrix = torch.randn(9, 4).double(), torch.randn(50, 4).double()
    wanted = torch.randint(0, 50, (9,))
    found = head.log_likelihoods(normed, wanted, matrix.split(n_rows))
    whole = (normed @ matrix.T).log_softmax(dim=-1)
    assert torch.allclose(found, whole[torch.arange(9), wanted])


def test_a_longer_window_than_text_sees_all_of_it(model):
    """A text shorter than everything that could leave something out."""
    short = some_tokens(model, (4,))
    one = observed(model, short, arithmetic_of())
    other = observed(model, short, arithmetic_of(), block=2)
    np.testing.assert_allclose(one.sums, other.sums, rtol=1e-12)
