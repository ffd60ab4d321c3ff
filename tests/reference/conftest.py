"""Checkpoints, weights and texts that the tests of the reference share."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.miniature.checkpoint import write_miniature
from tests.conftest import SMALL
from tests.engines.conftest import mainline as mainline
from tests.reference.hyperparameters import Candidates, Hyperparameters
from tests.reference.weights import Weights, draft_from_checkpoint, from_checkpoint

N_TOKENS = 28


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small gain nothing from threads, which fight with those of other tests."""
    libraries = [
        ctypes.CDLL(str(path))
        for path in Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas*")
    ]
    before = [library.scipy_openblas_get_num_threads64_() for library in libraries]
    before_torch = torch.get_num_threads()
    torch.set_num_threads(1)
    for library in libraries:
        library.scipy_openblas_set_num_threads64_(1)
    yield
    torch.set_num_threads(before_torch)
    for library, n_threads in zip(libraries, before, strict=True):
        library.scipy_openblas_set_num_threads64_(n_threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small miniature in which every rule of the forward pass has something to do.

    Two groups of heads; and so many index heads that no score is exactly zero, where ties would
    leave a pick to chance.
    """
    folder = tmp_path_factory.mktemp("reference checkpoint")
    size = replace(SMALL, n_heads=4, o_groups=2, o_lora=128, index_heads=16, n_experts=6)
    write_miniature(folder, size, seed=2)
    return folder


@pytest.fixture(scope="session")
def weights(checkpoint) -> Weights:
    return from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def draft_weights(checkpoint) -> Weights:
    return draft_from_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def tight(weights) -> Hyperparameters:
    """Limits so low that all of them bind within a few dozen tokens."""
    return tightened(weights.hyperparameters)


def tightened(h: Hyperparameters) -> Hyperparameters:
    assert h.candidates
    return replace(
        h,
        window=8,
        index_top_k=4,
        candidates=Candidates(source=h.candidates.source, block=3, count=3),
        clamps=(0.4,) * h.n_layers,
        shared_clamps=(0.4,) * h.n_layers,
    )


@pytest.fixture(scope="session")
def tokens(weights) -> list[int]:
    return some_tokens(weights.hyperparameters.vocab_size, N_TOKENS)


def some_tokens(vocab_size: int, count: int) -> list[int]:
    return np.random.default_rng(7).integers(3, vocab_size, count).tolist()
