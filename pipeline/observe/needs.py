"""How large things are: weights, state, scratch; how much is read and computed.

Everything follows from the model, the lengths of the sequences and the type of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.config import ModelConfig
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.chunk import EXPERT_TOKENS
from pipeline.observe.state import FIXED_TYPES, offsets
from pipeline.observe.topology import Slot, makers, written
from pipeline.source.spec import TensorSpec

_INDEX_NBYTES = 8
_FLOPS_PER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Weights and stored bytes of every layer without its routed experts, and of one of those."""

    dense: tuple[int, ...]
    dense_nbytes: tuple[int, ...]
    expert: int
    expert_nbytes: int

    @classmethod
    def of(cls, config: ModelConfig, specs: Mapping[str, TensorSpec]) -> Sizes:
        """The sizes of a checkpoint, whose tensors are given by name."""
        dense, nbytes = [0] * config.n_layers, [0] * config.n_layers
        for name, spec in specs.items():
            stem, _, rest = name.partition(".")
            if stem != "layers" or ".ffn.experts." in name or ".engram.embed." in name:
                continue
            layer = int(rest.partition(".")[0])
            nbytes[layer] += spec.nbytes
            dense[layer] += 0 if name.endswith(".scale") else math.prod(spec.shape)
        stored = [s.nbytes for n, s in specs.items() if n.startswith("layers.0.ffn.experts.0.")]
        expert = 3 * config.hidden * config.expert_ff
        return cls(tuple(dense), tuple(nbytes), expert, sum(stored))


def token_scratch_nbytes(config: ModelConfig, longest: int, arithmetic: Arithmetic) -> int:
    """Most bytes that one token of a block takes on its way through the attention pass."""
    c = config
    heads, streams = c.n_heads * c.head_dim, c.hc_mult * c.hidden
    n_read = min(c.sliding_window, longest) + min(c.index_top_k, longest)
    gathered = 4 * heads + n_read * (c.head_dim + c.n_heads)
    indexed = longest * (c.index_heads + 4)
    mixed = 6 * streams + 4 * c.n_experts
    recalled = 2 * c.engram.n_columns * c.engram.head_dim + c.hidden if c.engram else 0
    numbers = 3 * longest + n_read + 2 * c.n_experts
    values = gathered + indexed + mixed + recalled
    return values * arithmetic.values.itemsize + numbers * _INDEX_NBYTES


def chunk_token_nbytes(config: ModelConfig, arithmetic: Arithmetic) -> int:
    """Bytes of one token in a chunk: input and output of the experts, mixes, route, norms."""
    values = 2 * config.hidden + config.hc_mult * (config.hc_mult + 2) + config.n_experts_used
    numbers = 5 * config.n_experts_used + 1
    return values * arithmetic.values.itemsize + numbers * _INDEX_NBYTES


def sequence_nbytes(config: ModelConfig, longest: int, arithmetic: Arithmetic) -> int:
    """Bytes of the longest sequence on its way: streams twice, inputs, rows."""
    width = (2 * config.hc_mult + 1) * config.hidden + 8 * config.head_dim
    return longest * width * arithmetic.values.itemsize


def streams_nbytes(config: ModelConfig, longest: int, arithmetic: Arithmetic) -> int:
    """Bytes of the longest sequence's streams alone."""
    return longest * config.hc_mult * config.hidden * arithmetic.values.itemsize


def batch_nbytes(config: ModelConfig, n_tokens: int, arithmetic: Arithmetic) -> int:
    """Bytes of a batch of tokens in an expert: inputs, both projections, outputs and their norm."""
    values = (2 * config.hidden + 5 * config.expert_ff) * arithmetic.values.itemsize
    return min(EXPERT_TOKENS, n_tokens) * (values + config.hidden * _INDEX_NBYTES)


def state_nbytes(config: ModelConfig, lengths: Sequence[int], arithmetic: Arithmetic) -> int:
    """Bytes of the largest state between two layers."""
    layers = range(config.n_layers)
    return max(_carried_nbytes(config, lengths, layer, arithmetic) for layer in layers)


def disk_nbytes(config: ModelConfig, lengths: Sequence[int], arithmetic: Arithmetic) -> int:
    """The most that lies on the disk at a time: a state, and what the next layer makes of it."""
    most = 0
    for layer in range(config.n_layers):
        before = _carried_nbytes(config, lengths, layer - 1, arithmetic) if layer else 0
        made = written(config, layer)
        fresh = (_slot_nbytes(slot, config, lengths, layer, arithmetic) for slot in made)
        most = max(most, before + sum(fresh))
    return most


def flops(config: ModelConfig, sizes: Sizes, lengths: Sequence[int]) -> int:
    """Floating-point operations of all layers: two for every weight that a token meets."""
    c, total = config, 0
    for layer, ratio in enumerate(c.layer_ratios):
        met = sizes.dense[layer] + c.n_experts_used * sizes.expert
        for n in lengths:
            n_rows = n // ratio if ratio else 0
            n_read = min(c.sliding_window, n) + min(c.index_top_k, n_rows)
            products = met + 2 * c.n_heads * c.head_dim * n_read
            if layer in c.index_sources:
                products += c.index_heads * c.index_dim * n_rows
            total += _FLOPS_PER_WEIGHT * products * n
    return total


def read_nbytes(config: ModelConfig, sizes: Sizes, n_tokens: int, n_chunks: int) -> int:
    """Most bytes that are read of the checkpoint: every chunk asks for every expert."""
    experts = config.n_layers * config.n_experts * sizes.expert_nbytes * n_chunks
    rows = 2 * config.hidden
    if config.engram:
        n_weights = len(config.engram.layers) * config.engram.n_columns * config.engram.head_dim
        rows += n_weights + n_weights // 32
    return sum(sizes.dense_nbytes) + experts + n_tokens * rows


def _carried_nbytes(
    config: ModelConfig, lengths: Sequence[int], layer: int, arithmetic: Arithmetic
) -> int:
    return sum(
        _slot_nbytes(slot, config, lengths, maker, arithmetic)
        for slot, maker in makers(config, layer).items()
    )


def _slot_nbytes(
    slot: Slot, config: ModelConfig, lengths: Sequence[int], maker: int, arithmetic: Arithmetic
) -> int:
    dtype = FIXED_TYPES.get(slot, arithmetic.values)
    return offsets(slot, config, maker, lengths, dtype)[-1]
