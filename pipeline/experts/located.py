"""Errors found after a file was read, given the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import Problems, QuantmillError


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Let errors of the block that name no file name ``path``."""
    try:
        yield
    except Problems as several:
        found = [_at(problem, path) for problem in several.problems]
        raise Problems(str(path), found) from None
    except QuantmillError as error:
        raise _at(error, path) from None


def _at(error: QuantmillError, path: Path) -> QuantmillError:
    return error.from_state({**error.__dict__, "file": error.file or str(path)})
