"""What a tensor adds to the sum, either way."""

import pytest

from pipeline.model.layout import Layout
from pipeline.solve.measure import Loss
from pipeline.solve.objective import Objective, error_of, n_passed
from tests.pipeline.solve.asking import config, targets

RELATIVE, ABSOLUTE = Objective
LOSS = Loss(squared_error=6.0, squared_norm=48.0, n_rows=4, n_rows_total=400)


def tensor(name, layout=Layout.FORK):
    return next(target for target in targets(layout) if target.name == name)


def error(name, objective, loss=LOSS, layout=Layout.FORK, weight=1.0):
    return error_of(tensor(name, layout), loss, objective=objective, config=config(), weight=weight)


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_up_exps.weight", "blk.0.attn_q_a.weight", "blk.1.engram_embd.weight"]
)
def test_relative_is_noise_to_signal_of_one_matrix(name):
    assert error(name, RELATIVE) == 6 / 48
    assert error(name, RELATIVE, weight=3.0) == 3 * 6 / 48


def test_relative_does_not_change_with_the_scale_of_a_matrix():
    scaled = Loss(LOSS.squared_error * 9, LOSS.squared_norm * 9, 4, 400)
    assert error("blk.0.attn_q_a.weight", RELATIVE, scaled) == 6 / 48


def test_a_joined_table_counts_as_often_as_it_holds_tables():
    name = "per_layer_token_embd.weight"
    n_tables = len(config().engram.layers)
    assert n_tables == 2
    assert error(name, RELATIVE, layout=Layout.MAINLINE) == n_tables * 6 / 48
    assert sum(n_passed(t) for t in targets(Layout.FORK) if t.is_table) == n_tables


@pytest.mark.parametrize("objective", Objective)
def test_what_no_token_reads_counts_nothing(objective):
    assert error("blk.0.exp_probs_b_vl.bias", objective) == 0


def test_zeros_lose_nothing():
    assert error("blk.0.attn_q_a.weight", RELATIVE, Loss(0.0, 0.0, 4, 400)) == 0


@pytest.mark.parametrize(
    ("name", "n_read"),
    [
        ("blk.0.attn_q_a.weight", lambda t: t.n_rows),
        ("blk.0.ffn_up_exps.weight", lambda t: t.n_rows // 4 * 2),
        ("token_embd.weight", lambda t: 1),
        ("blk.1.engram_embd.weight", lambda t: config().engram.n_columns),
    ],
)
def test_absolute_is_the_error_of_the_rows_that_a_token_reads(name, n_read):
    assert error(name, ABSOLUTE) == pytest.approx(n_read(tensor(name)) * 6 / 4)
