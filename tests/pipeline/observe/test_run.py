"""The streamed pass against the reference, which has the whole model and a whole text in memory."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.model.config import CandidateConfig
from tests.conftest import SMALL
from tests.pipeline.observe.observing import (
    Model,
    arithmetic_of,
    assert_logits,
    assert_sums,
    expected,
    observed,
    relative,
    some_tokens,
    write_tight,
)

CHUNKS = (range(1), range(1, 3), range(3, 5))


@pytest.mark.parametrize(
    "changes",
    [{}, {"block": 7}, {"block": 1}, {"chunks": CHUNKS}, {"block": 16, "n_ahead": 5}],
    ids=str,
)
def test_sums_and_logits_are_those_of_the_whole_model(changes, model, tokens, wanted):
    found = observed(model, tokens, **changes)
    assert_sums(found, wanted, 1e-10)
    assert_logits(found, wanted, 1e-10)


def test_state_on_disk_gives_the_same(model, tokens, wanted, tmp_path):
    found = observed(model, tokens, folder=tmp_path, chunks=CHUNKS, block=16)
    assert_sums(found, wanted, 1e-10)
    assert_logits(found, wanted, 1e-10)


@pytest.mark.parametrize("changes", [{}, {"chunks": CHUNKS, "block": 16}], ids=str)
def test_single_precision(changes, model, tokens, wanted):
    found = observed(model, tokens, arithmetic_of("float32"), **changes)
    assert_sums(found, wanted, 1e-4)
    assert_logits(found, wanted, 1e-4)


def test_bfloat16_products_stay_near(model, tokens, wanted):
    """In layer 0; what follows from other experts being chosen there says nothing."""
    found = observed(model, tokens, arithmetic_of("bfloat16"))
    assert found.sums[:, 0].sum() == wanted.sums[:, 0].sum()
    assert 1e-6 < relative(found.sums[:, :, 0], wanted.sums[:, :, 0]) < 0.05


@pytest.mark.parametrize(
    "wider",
    [
        {"sliding_window": 9},
        {"index_top_k": 5},
        {"candidate": CandidateConfig(source_layer=3, block_size=3, top_k=4)},
        {"swiglu_limit": 0.5},
        {"norm_weights": False},
    ],
    ids=str,
)
def test_every_limit_binds(wider, model, tokens, wanted):
    found = observed(model, tokens, config=replace(model.config, **wider))
    assert relative(found.sums, wanted.sums) > 1e-4


def test_what_a_text_gives_does_not_depend_on_the_others(model, tokens):
    alone = [observed(model, [one]).sums[0] for one in tokens]
    together = observed(model, tokens).sums
    np.testing.assert_allclose(together[0], sum(alone[0::2]), rtol=1e-10)
    np.testing.assert_allclose(together[1], sum(alone[1::2]), rtol=1e-10)


@pytest.mark.parametrize("longest", [1, 3])
def test_the_shortest_texts(longest, model):
    """A token alone sees no compressed row, and no second order of the engram."""
    short = some_tokens(model, (longest, 1, 2))
    found = observed(model, short)
    assert_sums(found, expected(model, short), 1e-10)


@pytest.mark.slow
def test_the_released_order_of_layers(tmp_path):
    size = replace(SMALL, n_layers=40, n_heads=4, o_groups=2, o_lora=128, index_heads=32)
    model = Model(write_tight(tmp_path, replace(size, n_experts=12, n_experts_used=6), seed=5))
    tokens = some_tokens(model, (70, 30, 45))
    wanted = expected(model, tokens)
    assert_sums(observed(model, tokens, block=16), wanted, 1e-9)
    assert_sums(observed(model, tokens, arithmetic_of("float32")), wanted, 1e-3)
