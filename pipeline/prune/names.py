"""Which stored tensors lose something with an expert; names of DeepSeek's released checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass

_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(\w+\.\w+)")
_ROUTER = re.compile(r"layers\.(\d+)\.ffn\.gate\.\w+")

FIRST_PART = "w1.weight"
"""The part of an expert that says which file it is in."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of one routed expert of the trunk."""

    layer: int
    expert: int
    part: str

    @property
    def name(self) -> str:
        """The stored name."""
        return f"layers.{self.layer}.ffn.experts.{self.expert}.{self.part}"


def expert_tensor(name: str) -> ExpertTensor | None:
    """What ``name`` is of a routed expert; None where it is of none. A draft's are its own."""
    match = _EXPERT.fullmatch(name)
    return ExpertTensor(int(match[1]), int(match[2]), match[3]) if match else None


def router_layer(name: str) -> int | None:
    """The layer whose router ``name`` belongs to: its rows and its biases, one per expert."""
    match = _ROUTER.fullmatch(name)
    return int(match[1]) if match else None
