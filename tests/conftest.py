"""Fixtures that several test modules share."""

from pathlib import Path

import pytest

from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize

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
