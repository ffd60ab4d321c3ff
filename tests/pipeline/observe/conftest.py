"""A small checkpoint, a text of several sequences, and what the reference makes of them."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import SMALL
from tests.pipeline.observe.observing import Model, expected, some_tokens, write_tight

LENGTHS = (40, 2, 61, 9, 33)
SIZE = replace(SMALL, n_heads=4, o_groups=2, o_lora=128, index_heads=16, n_experts=6)
"""So many index heads that no score is exactly zero, where ties would leave a pick to chance."""


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small gain nothing from threads, which fight with those of other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model(tmp_path_factory) -> Model:
    return Model(write_tight(tmp_path_factory.mktemp("observed checkpoint"), SIZE, seed=2))


@pytest.fixture(scope="package")
def tokens(model):
    return some_tokens(model, LENGTHS)


@pytest.fixture(scope="package")
def wanted(model, tokens):
    return expected(model, tokens)
