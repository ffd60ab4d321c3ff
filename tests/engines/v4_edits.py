"""A small V4 model with one thing changed: what engines say of it, and what we do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.form import V4_TARGET
from tests.engines.conversion import convert
from tests.engines.edited import Content, Edited
from tests.engines.engine import Engine

P = "deepseek4."

WRONG = 0.05
"""Mean distance of log-probabilities from which on something else is computed."""

_N_TOKENS = 140
"""More than the window and than a block of 128, and more blocks of 4 than the index picks."""

Edit = Callable[[Edited], Edited]


@dataclass(frozen=True)
class Changed:
    """A file with an edited model."""

    path: Path
    as_it_was: Callable[[Engine], NDArray[np.float64]]

    def said(self, engine: Engine) -> NDArray[np.float64]:
        """Log-probabilities after each token of a text."""
        return _said(engine, self.path)

    def distance(self, engine: Engine) -> float:
        """Mean distance from what the engine says of the model as it was."""
        return float(np.abs(self.said(engine) - self.as_it_was(engine)).mean())

    @property
    def told(self) -> list[str]:
        """What our contract says."""
        return [str(problem) for problem in check_contract(read_model(self.path), V4_TARGET)]


class V4Edits:
    """The native recipe's files of a checkpoint, and edits of its target, one at a time."""

    def __init__(self, source: Path, folder: Path) -> None:
        made = convert(source, folder, "v4-native")
        self.model, self.draft = Edited.read(made.target), Edited.read([made.draft])
        self.config: Mapping = json.loads((source / "config.json").read_text())
        right, self._path = self.model.write(folder / "right.gguf"), folder / "edited.gguf"
        self._as_it_was = cache(lambda engine: _said(engine, right))

    def __call__(self, edit: Edit) -> Changed:
        """The file that ``edit`` makes; the one before is gone."""
        return Changed(edit(self.model).write(self._path), self._as_it_was)


def _said(engine: Engine, path: Path) -> NDArray[np.float64]:
    with engine.load([path]) as session:
        tokens = np.random.default_rng(3).integers(0, session.n_vocab, _N_TOKENS)
        return session.logprobs(tokens.tolist())


def untouched(m: Edited) -> Edited:
    return m


def with_key(entry: KeyValue) -> Edit:
    return lambda m: m.key(entry)


def without_key(name: str) -> Edit:
    return lambda m: m.without_key(f"{P}{name}")


def with_values(name: str, change: Callable[[list], list]) -> Edit:
    return lambda m: m.values(f"{P}{name}", change)


def without(tensor: str) -> Edit:
    return lambda m: m.without_tensor(tensor)


def also_as(tensor: str, name: str) -> Edit:
    """An edit that has a tensor under a second name."""
    return lambda m: m.tensor(name, m.tensors[tensor])


def transposed(tensor: str) -> Edit:
    """An edit that states the dimensions of a tensor the other way round."""

    def edit(m: Edited) -> Edited:
        old = m.tensors[tensor]
        return m.tensor(tensor, Content(old.ne[::-1], old.type_name, old.data))

    return edit


def first_of(m: Edited, tensor: str, n: int) -> Edited:
    """With the first ``n`` entries along the last axis only, as of a stack of experts."""
    old = m.tensors[tensor]
    data = old.data[: len(old.data) // old.ne[-1] * n]
    return m.tensor(tensor, Content((*old.ne[:-1], n), old.type_name, data))
