"""Fixtures that several test modules share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A miniature checkpoint in the released layout; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("miniature checkpoint")
    write_miniature(folder, MiniatureSize(), seed=0)
    yield folder
