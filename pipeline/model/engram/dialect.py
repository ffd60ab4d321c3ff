"""Which engram layout a V4.1 GGUF has, told by tensor names and keys; others' forms by name.

Several projects use the architecture name `deepseek41` for files that no common loader shares.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from pipeline.model.dialects import FORK_TABLE, MAINLINE_TABLE, foreign_dialect
from pipeline.model.layout import Layout

__all__ = ["MAINLINE_TABLE", "Dialect", "engram_tensors", "recognise", "table_layers"]

_ANY_ENGRAM = re.compile(r"per_layer_token_embd\.weight|.*\bengram_.*")


@dataclass(frozen=True, slots=True)
class Dialect:
    """A layout this project knows, or the name of one it does not."""

    layout: Layout | None
    name: str


def recognise(tensors: Collection[str], keys: Collection[str]) -> Dialect:
    """The layout of a file with these tensor names and keys."""
    foreign = foreign_dialect(tensors, keys)
    if foreign is not None:
        return Dialect(None, foreign.name)
    layout = Layout.MAINLINE if MAINLINE_TABLE in tensors else Layout.FORK
    return Dialect(layout, layout.value)


def table_layers(tensors: Collection[str]) -> tuple[int, ...]:
    """The layers that have a table of their own (fork layout), in order."""
    return tuple(sorted(int(name.split(".")[1]) for name in tensors if FORK_TABLE.fullmatch(name)))


def engram_tensors(tensors: Collection[str]) -> tuple[str, ...]:
    """The names among ``tensors`` that are those of engram tensors, in any form."""
    return tuple(sorted(name for name in tensors if _ANY_ENGRAM.fullmatch(name)))
