"""Luigi targets that look at files, cheaply: luigi asks for completeness often."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import luigi

from pipeline import files


class SpecTarget(luigi.Target):
    """A JSON file whose ``spec`` is the one wanted, and whose listed files have their lengths.

    The spec is asked for only when the file exists: a first run should not plan twice.
    """

    def __init__(self, path: Path, spec: Callable[[], str]) -> None:
        self.path = path
        self._spec = spec

    def exists(self) -> bool:
        """Whether what the file stands for is whole and still what is wanted."""
        document = read_document(self.path)
        return (
            document is not None
            and document.get("spec") == self._spec()
            and all(_has_length(self.path.parent, entry) for entry in _files(document))
        )


def read_document(path: Path) -> dict[str, object] | None:
    """The JSON object in ``path``; nothing where there is none."""
    if not path.exists():
        return None
    try:
        document = json.loads(files.read_bytes(path))
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _files(document: dict[str, object]) -> list[object]:
    listed = document.get("files", [])
    return listed if isinstance(listed, list) else [None]


def _has_length(folder: Path, entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    path = folder / str(entry.get("file"))
    return path.exists() and path.stat().st_size == entry.get("nbytes")


class PrintedTarget(luigi.Target):
    """Stands for a task whose result is what it printed: done once it ran in this process."""

    def __init__(self) -> None:
        self.done = False

    def exists(self) -> bool:
        """Whether the task has run."""
        return self.done


class PrintedTask(luigi.Task):
    """A task that runs whenever it is asked for; subclasses give `show`."""

    def output(self) -> PrintedTarget:
        """Done once it ran."""
        if not hasattr(self, "_printed"):
            self._printed = PrintedTarget()
        return self._printed

    def run(self) -> None:
        """Show, and remember that it was shown."""
        self.show()
        sys.stdout.flush()
        self.output().done = True

    def show(self) -> None:
        """Do the work and print its result."""
        raise AssertionError(f"{type(self).__name__} shows nothing")


class ConditionTarget(luigi.Target):
    """Stands for a state of the disk that a function can tell."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def exists(self) -> bool:
        """Whether it holds."""
        return self._holds()
