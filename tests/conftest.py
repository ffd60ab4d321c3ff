"""Fixtures that several test modules share."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize
from pipeline.miniature.v4_size import V4Size

# The same examples every time, however busy the machine is.
settings.register_profile("suite", derandomize=True, database=None, deadline=None)
settings.load_profile("suite")

SMALL = MiniatureSize(
    n_layers=6,
    hidden=256,
    n_heads=2,
    o_groups=1,
    o_lora=256,
    index_heads=2,
    n_experts=4,
    n_experts_used=2,
    engram_base=200,
    engram_heads=2,
    n_draft_experts=1,
    n_draft_experts_used=1,
    vocab_size=512,
)

SMALL_V4 = V4Size(
    n_layers=5,
    hidden=256,
    n_heads=2,
    o_groups=1,
    o_lora=256,
    n_experts=4,
    n_experts_used=2,
    vocab_size=512,
)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Whoever draws numbers without naming a seed draws the same ones every time."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def short_folder():
    """For TMPDIR: a process puts its sockets there, whose paths may have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="mill-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature checkpoint in the released layout; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("miniature checkpoint")
    write_miniature(folder, MiniatureSize(), seed=0)
    return folder


@pytest.fixture(scope="session")
def small_miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest checkpoint that has every kind of tensor: made and converted in a blink."""
    folder = tmp_path_factory.mktemp("small checkpoint")
    write_miniature(folder, SMALL, seed=1)
    return folder


@pytest.fixture(scope="session")
def v4_miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature of V4-Flash-0731; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("V4 miniature checkpoint")
    write_miniature(folder, V4Size(), seed=0)
    return folder


@pytest.fixture(scope="session")
def small_v4_miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest V4 checkpoint that has a layer of every kind."""
    folder = tmp_path_factory.mktemp("small V4 checkpoint")
    write_miniature(folder, SMALL_V4, seed=1)
    return folder
