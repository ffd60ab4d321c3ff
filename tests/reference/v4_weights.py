"""Weights of a V4-Flash-0731 checkpoint by their released names: safetensors and torch decode.

Formats as the released files have them (DeepSeek-V4-Flash config.json, inference/kernel.py and
convert.py): FP8 matrices with one E8M0 scale per 128x128 block, FP4 experts two to a byte (low half
first) with one per 32 inputs.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from tests.reference.arrays import Floats

FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class V4Weights:
    """The tensors of the checkpoint in ``folder`` as float64, each decoded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoded: dict[str, Floats] = {}
        self.config = json.loads((folder / "config.json").read_bytes())

    def __getitem__(self, name: str) -> Floats:
        """A whole tensor, as the release names it.

        Raises:
            KeyError: There is none of this name.
        """
        if name not in self._decoded:
            self._decoded[name] = self._decode(name).numpy().astype(np.float64)
        return self._decoded[name]

    def _decode(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        if stored.dtype == torch.int8:
            codes = stored.view(torch.uint8).long()
            pairs = torch.stack([FP4[codes & 15], FP4[codes >> 4]], dim=-1)
            return self._scaled(pairs.flatten(-2), name, FP4_BLOCK)
        if stored.dtype == torch.float8_e4m3fn:
            return self._scaled(stored.float(), name, FP8_BLOCK)
        return stored.float()

    def _scaled(self, values: torch.Tensor, name: str, block: tuple[int, int]) -> torch.Tensor:
        scales = self._stored(f"{name.removesuffix('.weight')}.scale").float()
        return values * scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)

    def _stored(self, name: str) -> torch.Tensor:
        return self._opened[self._index[name]].get_tensor(name)

    @cached_property
    def _index(self) -> dict[str, str]:
        index = self._folder / "model.safetensors.index.json"
        return json.loads(index.read_bytes())["weight_map"]

    @cached_property
    def _opened(self) -> dict[str, safe_open]:
        files = set(self._index.values())
        return {file: safe_open(self._folder / file, framework="pt") for file in files}
