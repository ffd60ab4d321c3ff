"""The one face of every engine that the tests run: releases of llama.cpp, built elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EngineError(Exception):
    """An engine did not do what it was asked; ``lines`` are its own words, the oldest first."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class Refused(EngineError):
    """The engine said no, as to a file that it cannot load."""


class EngineDied(EngineError):
    """The engine aborted, or gave no answer in time; its session is over."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What greedy decoding gave, and how many of a draft's tokens were tried and kept."""

    tokens: tuple[int, ...]
    n_drafted: int = 0
    n_accepted: int = 0


class Session(Protocol):
    """One loaded model. A context manager: leaving it closes the session."""

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""

    @property
    def n_params(self) -> int:
        """Parameters, as the engine counts them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as the engine counts them."""

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of ``text``, none added; ``special`` reads the names of control tokens as such."""

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Natural logarithms of the next token's probabilities, ``[n_positions, n_vocab]``.

        Row i is what the engine expects after ``tokens[: i + 1]``: its float32 logits of one
        batch, normalised here in double precision.

        Raises:
            EngineDied: Decoding aborted.
        """

    def generate(self, tokens: Sequence[int], n: int) -> Generation:
        """The ``n`` tokens after ``tokens``: each time the likeliest that spells printable ASCII.

        Only those, because one engine answers in JSON, which has no way to write a single byte of
        a longer character.
        """

    def close(self) -> None:
        """End the session; again is harmless."""

    def __enter__(self) -> Session: ...

    def __exit__(self, *raised: object) -> None: ...


class Engine(Protocol):
    """A build of llama.cpp that loads models into sessions."""

    @property
    def name(self) -> str:
        """What it is and which build, for people."""

    @property
    def architectures(self) -> frozenset[str]:
        """Values of ``general.architecture`` that it reads, of those that this project writes."""

    def load(
        self, files: Sequence[Path], *, draft: Path | None = None, n_ctx: int = 512
    ) -> Session:
        """Load a model.

        Args:
            files: The file, or every shard, the first one first.
            draft: A model of architecture ``dflash`` that drafts for it.
            n_ctx: Tokens that prompt and generation have room for.

        Raises:
            Refused: The engine does not read these files; with its error lines.
            EngineDied: It aborted over them.
        """
