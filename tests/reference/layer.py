"""One layer's weights and constants, as its maths asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.reference.arrays import Floats
from tests.reference.hyperparameters import Hyperparameters
from tests.reference.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer ``number`` of ``weights``; calling it with the end of a name gives a tensor."""

    weights: Weights
    h: Hyperparameters
    number: int

    def __call__(self, name: str) -> Floats:
        return self.weights.tensor(f"blk.{self.number}.{name}")

    @property
    def ratio(self) -> int:
        """Tokens per compressed row, 0 where there is none."""
        return self.h.ratios[self.number]
