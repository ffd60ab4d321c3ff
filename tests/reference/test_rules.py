"""Properties of the forward pass's parts, and values that follow from the released constants."""

from dataclasses import replace

import numpy as np
import pytest

from tests.reference import compression, config_json, hyper_connection, indexer, moe, rope
from tests.reference.attention import attend, window
from tests.reference.hyperparameters import Candidates, Yarn
from tests.reference.layer import Layer

RNG = np.random.default_rng(5)
RELEASED_YARN = Yarn(factor=16, original_context=65_536, beta_fast=32, beta_slow=1)


def normal(*shape):
    return RNG.standard_normal(shape)


def test_yarn_leaves_fast_pairs_and_slows_slow_ones_by_its_factor():
    plain = 160_000.0 ** (-np.arange(0, 64, 2) / 64)
    slower = plain / rope.slowed(plain, 160_000.0, RELEASED_YARN)
    assert (slower[:16] == 1).all()
    assert slower[25:] == pytest.approx(16)
    assert (np.diff(slower[15:26]) > 0).all()
    assert slower[16] == pytest.approx(1.1034, abs=1e-4)
    assert slower[24] == pytest.approx(6.4)


def test_rotation_keeps_products_of_equal_distance():
    q, k, rates = normal(1, 96), normal(1, 96), 0.5 ** np.arange(32)

    def product(at, back):
        turned = (
            rope.rotate(q, np.array([at]), rates),
            rope.rotate(k, np.array([at - back]), rates),
        )
        return np.vdot(*turned)

    assert product(40, 7) == pytest.approx(product(9, 7))
    assert product(40, 7) != pytest.approx(product(40, 8))


def test_rotation_leaves_the_first_channels_and_turns_back():
    x, at, rates = normal(3, 2, 80), np.array([0, 5, 900]), 0.5 ** np.arange(32)
    turned = rope.rotate(x, at, rates)
    assert (turned[..., :16] == x[..., :16]).all()
    assert (turned[0] == x[0]).all()
    assert rope.rotate(turned, at, rates, inverse=True) == pytest.approx(x)


def test_sinkhorn_ends_with_columns_and_brings_rows_near_one(weights):
    comb = hyper_connection.sinkhorn(normal(50, 4, 4), weights.hyperparameters)
    assert comb.sum(axis=1) == pytest.approx(1, abs=2e-6)
    assert comb.sum(axis=2) == pytest.approx(1, abs=1e-3)
    assert (comb > 0).all()


def test_expand_moves_the_first_index_to_the_second():
    streams, comb = normal(1, 4, 3), np.zeros((1, 4, 4))
    comb[0, 2, 1] = 1
    mix = hyper_connection.Mixes(np.ones((1, 4)), np.array([[0, 0, 0, 2.0]]), comb)
    moved = hyper_connection.expand(np.full((1, 3), 0.5), streams, mix)
    assert moved[0, 1] == pytest.approx(streams[0, 2])
    assert (moved[0, [0, 2]] == 0).all()
    assert (moved[0, 3] == 1).all()


def test_a_sink_takes_weight_and_brings_nothing():
    rows, seen = normal(5, 8), np.ones((2, 5), bool)
    q = normal(2, 3, 8)
    plain = attend(q, rows, seen, np.full(3, -np.inf))
    equal = np.log(np.exp(q @ rows.T / np.sqrt(8)).sum(-1))
    halved = np.stack([attend(q, rows, seen, sinks) for sinks in equal])
    assert halved[[0, 1], [0, 1]] == pytest.approx(plain / 2)


def test_a_window_holds_its_width_and_the_token_itself():
    seen = window(np.arange(3, 6), 6, 3)
    assert seen.tolist() == [
        [False, True, True, True, False, False],
        [False, False, True, True, True, False],
        [False, False, False, True, True, True],
    ]


@pytest.mark.parametrize(
    ("ratio", "n_seen"), [(1, [1, 2, 3, 4, 5]), (2, [0, 1, 1, 2, 2]), (4, [0, 0, 0, 1, 1])]
)
def test_a_group_is_seen_from_the_token_that_finishes_it(ratio, n_seen):
    assert compression.finished(np.arange(5), 9, ratio).sum(axis=1).tolist() == n_seen


def test_pooling_is_a_mean_of_its_own_in_every_channel():
    rows, gates = normal(3, 2, 4), np.zeros((3, 2, 4))
    gates[:, 1, 2] = 1000
    pooled = compression.pool(rows, gates)
    assert pooled[:, 2] == pytest.approx(rows[:, 1, 2])
    assert pooled[:, [0, 1, 3]] == pytest.approx(rows.mean(axis=1)[:, [0, 1, 3]])


def test_the_pick_is_the_best_of_what_is_allowed_and_ties_fall_to_the_lower_row():
    wanted = np.array([[5.0, 1.0, 4.0, 4.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    allowed = np.array([[False, True, True, True, True], [True, True, False, False, False]])
    assert indexer.best(wanted, allowed, 2).tolist() == [
        [False, False, True, True, False],
        [True, True, False, False, False],
    ]
    assert indexer.best(wanted, allowed, 9).tolist() == allowed.tolist()


def test_candidates_are_the_best_blocks_and_the_newest():
    finished = compression.finished(np.array([0, 4, 6]), 7, 1)
    wanted = np.tile([0.0, 0.0, 3.0, 0.0, 9.0, 0.0, 1.0], (3, 1))
    kept = indexer.candidate_rows(wanted, finished, Candidates(source=0, block=2, count=2))
    assert kept.tolist() == [
        [True, True, False, False, False, False, False],  # all others are still unfinished
        [False, False, True, True, True, True, False],
        [False, False, False, False, True, True, True],
    ]


def test_gates_share_the_scale(weights):
    layer = Layer(weights, weights.hyperparameters, 3)
    x = normal(20, 256)
    experts, gates = moe.route(x, layer, masked=[0, 2])
    assert gates.sum(axis=1) == pytest.approx(layer.h.weights_scale)
    assert not np.isin(experts, [0, 2]).any()
    assert len(np.unique(experts)) > layer.h.n_experts_used
    assert all(len(set(of_token)) == len(of_token) for of_token in experts.tolist())


def test_a_single_expert_keeps_its_score(weights):
    h = replace(weights.hyperparameters, n_experts_used=1)
    scores = np.array([[0.5, 0.25]])
    assert moe.gates_of(scores, np.array([[1]]), h) == pytest.approx(0.25 * h.weights_scale)


def test_the_activation_limits_the_gate_from_above_only():
    gate, up = np.array([9.0, -9.0, 1.0, 1.0]), np.array([1.0, 1.0, 9.0, -9.0])
    silu = gate.clip(None, 2) / (1 + np.exp(-gate.clip(None, 2)))
    assert moe.activation(gate, up, 2.0) == pytest.approx(silu * [1, 1, 2, -2])


def test_the_observer_sees_the_whole_mixture(weights):
    layer = Layer(weights, weights.hyperparameters, 4)
    x, at = normal(6, 256), np.arange(10, 16)
    rebuilt = moe.shared_expert(x, layer)

    def observe(number, expert, positions, gates, outputs):
        assert number == 4
        assert expert < layer.h.n_experts
        rebuilt[positions - 10] += gates[:, None] * outputs

    assert moe.mixture(x, at, layer, observer=observe) == pytest.approx(rebuilt, abs=1e-9)


def test_constants_of_the_config_are_read(checkpoint):
    trunk, draft = config_json.trunk(checkpoint), config_json.draft(checkpoint)
    assert (trunk.n_layers, draft.n_layers) == (6, 3)
    assert trunk.ratios == (0, 0, 2, 1, 1, 1)
    assert (trunk.kv_sources, trunk.index_sources) == ((2, 3), (2, 3, 5))
    assert trunk.yarn == RELEASED_YARN
    assert draft.ratios == (0, 0, 0)
    assert replace(draft, draft=None).window == trunk.window
    assert draft.draft.targets == (3, 4, 5)
