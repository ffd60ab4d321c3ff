"""How far from exact a file's answers are, over the positions of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.engines.engine import Engine
from tests.engines.shipped import Shipped

N_POSITIONS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says of a file: log-probabilities at every position, and what it counted."""

    logprobs: NDArray[np.float64]
    n_params: int
    nbytes: int

    @property
    def bpw(self) -> float:
        """Bits per weight of the whole file."""
        return 8 * self.nbytes / self.n_params


@dataclass(frozen=True, slots=True)
class Quality:
    """``kl``: mean Kullback-Leibler divergence from exact, in nats. ``top_1``: share of positions
    with the same likeliest token."""

    kl: float
    top_1: float


def quality_of(exact: NDArray[np.float64], logprobs: NDArray[np.float64]) -> Quality:
    """How far ``logprobs`` are from ``exact``, both ``[n_positions, n_vocab]``."""
    divergences = (np.exp(exact) * (exact - logprobs)).sum(axis=1)
    agrees = exact.argmax(axis=1) == logprobs.argmax(axis=1)
    return Quality(float(divergences.mean()), float(agrees.mean()))


class Bench:
    """Asks engines about the files of shipped recipes, each once."""

    def __init__(self, shipped: Shipped) -> None:
        self.shipped = shipped
        self.answer = cache(_answer)

    def made(self, engine: Engine, recipe: str) -> Answer:
        """What ``engine`` says of the recipe's file."""
        return self.answer(engine, self.shipped.made(recipe).target)

    def quality(self, engine: Engine, recipe: str) -> Quality:
        """How far that is from what the same engine says of the same experts in F32."""
        exact = self.answer(engine, self.shipped.exact(recipe))
        return quality_of(exact.logprobs, self.made(engine, recipe).logprobs)


def _answer(engine: Engine, files: Sequence[Path]) -> Answer:
    with engine.load(files) as session:
        tokens = np.random.default_rng(5).integers(0, session.n_vocab, N_POSITIONS)
        logprobs = session.logprobs(tokens.tolist())
        return Answer(logprobs, session.n_params, session.nbytes)
