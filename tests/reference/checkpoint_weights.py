"""Weights straight from a checkpoint: safetensors and torch decode, a table of names does the rest.

Formats as the released files have them (DeepSeek-V4.1-Flash config.json, inference/kernel.py and
convert.py): FP8 matrices with one E8M0 scale per 32x32 block, FP4 experts two to a byte (low half
first) with one per 32 inputs, engram tables FP8 with one per 32 columns of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from tests.reference import config_json
from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters

GROUP = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

BLOCK_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "attn_sinks.weight": "attn.attn_sink",
    "attn_q_a.weight": "attn.wq_a.weight",
    "attn_q_a_norm.weight": "attn.q_norm.weight",
    "attn_q_b.weight": "attn.wq_b.weight",
    "attn_kv.weight": "attn.wkv.weight",
    "attn_kv_a_norm.weight": "attn.kv_norm.weight",
    "attn_output_a.weight": "attn.wo_a.weight",
    "attn_output_b.weight": "attn.wo_b.weight",
    "attn_compressor_kv.weight": "attn.compressor.wkv.weight",
    "attn_compressor_gate.weight": "attn.compressor.wgate.weight",
    "attn_compressor_norm.weight": "attn.compressor.norm.weight",
    "indexer.attn_k.weight": "attn.indexer.wk.weight",
    "indexer.k_norm.weight": "attn.indexer.k_norm.weight",
    "indexer.attn_q_b.weight": "attn.indexer.wq_b.weight",
    "indexer.proj.weight": "attn.indexer.weights_proj.weight",
    "hc_attn_fn.weight": "hc_attn_fn",
    "hc_attn_base.weight": "hc_attn_base",
    "hc_attn_scale.weight": "hc_attn_scale",
    "hc_ffn_fn.weight": "hc_ffn_fn",
    "hc_ffn_base.weight": "hc_ffn_base",
    "hc_ffn_scale.weight": "hc_ffn_scale",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn_gate_inp.weight": "ffn.gate.weight",
    "exp_probs_b.bias": "ffn.gate.bias",
    "ffn_gate_shexp.weight": "ffn.shared_experts.w1.weight",
    "ffn_up_shexp.weight": "ffn.shared_experts.w3.weight",
    "ffn_down_shexp.weight": "ffn.shared_experts.w2.weight",
    "engram_wkv.weight": "engram.wkv.weight",
    "engram_embd.weight": "engram.embed.weight",
}
"""End of a name here -> end of the released name, for one tensor each."""

EXPERT_NAMES = {
    "ffn_gate_exps.weight": "w1",
    "ffn_up_exps.weight": "w3",
    "ffn_down_exps.weight": "w2",
}

TRUNK_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
}

DRAFT_NAMES = {
    "fc.weight": "mtp.0.main_proj.weight",
    "enc.output_norm.weight": "mtp.0.main_norm.weight",
    "output_norm.weight": "mtp.2.norm.weight",
    "markov_w1.weight": "mtp.2.markov_head.embed.weight",
    "markov_w2.weight": "mtp.2.markov_head.head.weight",
    "conf_proj.weight": "mtp.2.confidence_head.proj.weight",
}


class CheckpointWeights:
    """Float32 tensors of the checkpoint in ``folder``, decoded at every call."""

    def __init__(
        self, folder: Path, stem: str, names: Mapping[str, str], hyperparameters: Hyperparameters
    ) -> None:
        self.hyperparameters = hyperparameters
        self._stem = stem
        self._names = names
        self._folder = folder

    @classmethod
    def trunk(cls, folder: Path) -> CheckpointWeights:
        """The trunk, with its embedding, head and engram tables."""
        return cls(folder, "layers", TRUNK_NAMES, config_json.trunk(folder))

    @classmethod
    def draft(cls, folder: Path) -> CheckpointWeights:
        """The draft; embedding and head are the trunk's."""
        return cls(folder, "mtp", DRAFT_NAMES, config_json.draft(folder))

    def tensor(self, name: str) -> Floats:
        if name in self._names:
            return self._decoded(self._names[name]).numpy()
        prefix, end = self._block(name)
        if end in EXPERT_NAMES:
            experts = range(self.hyperparameters.n_experts)
            matrix = EXPERT_NAMES[end]
            parts = [self._decoded(f"{prefix}.ffn.experts.{n}.{matrix}.weight") for n in experts]
            return torch.stack(parts).numpy()
        if end == "engram_gate.weight":
            gains = (self._decoded(f"{prefix}.engram.{side}_weight").numpy() for side in "qk")
            return np.multiply(*gains)
        return self._decoded(f"{prefix}.{BLOCK_NAMES[end]}").numpy()

    def rows(self, name: str, numbers: Ints) -> Floats:
        at = torch.from_numpy(numbers)
        if name in self._names:
            return self._stored(self._names[name])[at].float().numpy()
        prefix, end = self._block(name)
        stored = f"{prefix}.{BLOCK_NAMES[end]}"
        # Only the rows' pages are read: the library hands out a map of the file.
        codes = self._stored(stored).view(torch.uint8)[at].view(torch.float8_e4m3fn)
        scales = self._stored(_scale(stored)).view(torch.uint8)[at].view(torch.float8_e8m0fnu)
        return _scaled(codes.float(), scales, 1, GROUP).numpy()

    def _block(self, name: str) -> tuple[str, str]:
        blk, number, end = name.split(".", 2)
        if blk != "blk":
            raise KeyError(name)
        return f"{self._stem}.{number}", end

    def _decoded(self, stored: str) -> torch.Tensor:
        values = self._stored(stored)
        if values.dtype == torch.int8:
            codes = values.view(torch.uint8).long()
            pairs = torch.stack([FP4[codes & 15], FP4[codes >> 4]], dim=-1)
            return _scaled(pairs.flatten(-2), self._stored(_scale(stored)), 1, GROUP)
        if values.dtype == torch.float8_e4m3fn:
            n_rows = 1 if ".engram.embed." in stored else GROUP
            return _scaled(values.float(), self._stored(_scale(stored)), n_rows, GROUP)
        return values.float()

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


def _scale(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.scale"


def _scaled(values: torch.Tensor, scales: torch.Tensor, n_rows: int, n_cols: int) -> torch.Tensor:
    """``values`` times the scale of their block of ``n_rows`` by ``n_cols``."""
    factors = scales.float().repeat_interleave(n_rows, 0).repeat_interleave(n_cols, 1)
    return values * factors[: values.shape[0], : values.shape[1]]
