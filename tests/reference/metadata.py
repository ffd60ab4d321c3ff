"""Constants of a GGUF, from its keys; in the fork layout layer kinds show in the tensors alone."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from tests.reference.hyperparameters import (
    Candidates,
    DraftShape,
    EngramHash,
    Hyperparameters,
    Yarn,
)

SQRT_SOFTPLUS = 4
JOINED_TABLE = "per_layer_token_embd.weight"

Keys = Mapping[str, Any]


def hyperparameters(keys: Keys, tensors: Collection[str]) -> Hyperparameters:
    """What the keys of a ``deepseek41`` or ``dflash`` file say.

    Args:
        keys: Every key of the file.
        tensors: The names of its tensors.
    """
    arch = keys["general.architecture"]
    own = {key.removeprefix(f"{arch}."): value for key, value in keys.items()}
    n_layers = own["block_count"]
    assert own["expert_gating_func"] == SQRT_SOFTPLUS
    return Hyperparameters(
        n_layers=n_layers,
        vocab_size=len(keys["tokenizer.ggml.tokens"]),
        n_heads=own["attention.head_count"],
        head_dim=own["attention.key_length"],
        rotary_dim=own["rope.dimension_count"],
        o_groups=own["attention.output_group_count"],
        window=own["attention.sliding_window"],
        ratios=tuple(own.get("attention.compress_ratios", [0] * n_layers)[:n_layers]),
        rms_eps=own["attention.layer_norm_rms_epsilon"],
        rope_base=own["rope.freq_base"],
        compressed_rope_base=own.get("attention.compress_rope_freq_base", 0.0),
        yarn=_yarn(own),
        kv_sources=_sources(own.get("attention.kv_source_layers"), "attn_compressor_kv", tensors),
        index_sources=_sources(
            own.get("attention.indexer.source_layers"), "indexer.attn_q_b", tensors
        ),
        index_heads=own.get("attention.indexer.head_count", 0),
        index_dim=own.get("attention.indexer.key_length", 0),
        index_top_k=own.get("attention.indexer.top_k", 0),
        candidates=_candidates(own),
        n_experts=own["expert_count"],
        n_experts_used=own["expert_used_count"],
        weights_scale=own["expert_weights_scale"],
        normalise_weights=own["expert_weights_norm"],
        clamps=_per_layer(own["swiglu_clamp_exp"], n_layers),
        shared_clamps=_per_layer(own.get("swiglu_clamp_shexp", own["swiglu_clamp_exp"]), n_layers),
        n_streams=own["hyper_connection.count"],
        hc_eps=own["hyper_connection.epsilon"],
        sinkhorn_passes=own["hyper_connection.sinkhorn_iterations"],
        engram=_engram(own),
        draft=_draft(own),
    )


def _per_layer(value: float | list[float], n_layers: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list) else (value,) * n_layers


def _yarn(own: Keys) -> Yarn | None:
    if own.get("rope.scaling.type") != "yarn":
        return None
    return Yarn(
        factor=own["rope.scaling.factor"],
        original_context=own["rope.scaling.original_context_length"],
        beta_fast=own["rope.scaling.yarn_beta_fast"],
        beta_slow=own["rope.scaling.yarn_beta_slow"],
    )


def _sources(stated: list[int] | None, part: str, tensors: Collection[str]) -> tuple[int, ...]:
    """Layers that have the tensor; loaders of the fork layout go by that alone."""
    matches = (re.fullmatch(rf"blk\.(\d+)\.{re.escape(part)}\.weight", name) for name in tensors)
    found = tuple(sorted(int(match[1]) for match in matches if match))
    assert stated is None or tuple(stated) == found
    return found


def _candidates(own: Keys) -> Candidates | None:
    prefix = "attention.indexer.candidate"
    source = own.get(f"{prefix}_source_layer", -1)
    if source < 0:
        return None
    return Candidates(
        source=source,
        block=own[f"{prefix}_block_size"],
        count=own[f"{prefix}_top_k_blocks"],
    )


def _engram(own: Keys) -> EngramHash | None:
    if "ple.layers" in own:
        return _joined(own)
    return _separate(own) if "engram.layer_ids" in own else None


def _joined(own: Keys) -> EngramHash:
    """Mainline: one table, offsets that run on over all layers, the raw id of the pad token."""
    layers = tuple(own["ple.layers"])
    return EngramHash(
        layers=layers,
        n_heads=own["ple.heads_per_ngram"],
        multipliers=_split(own["ple.layer_multipliers"], len(layers)),
        primes=_split(own["ple.head_vocab_sizes"], len(layers)),
        offsets=_split(own["ple.head_offsets"], len(layers)),
        tables=(JOINED_TABLE,) * len(layers),
        token_map=tuple(own["engram.token_map"]),
        pad=own["engram.token_map"][own["engram.pad_token_id"]],
    )


def _separate(own: Keys) -> EngramHash:
    """Fork: a table per layer, offsets of its own, the mapped id of the pad token."""
    layers = tuple(own["engram.layer_ids"])
    return EngramHash(
        layers=layers,
        n_heads=own["engram.head_count"],
        multipliers=_split(own["engram.multipliers"], len(layers)),
        primes=_split(own["engram.primes"], len(layers)),
        offsets=_split(own["engram.offsets"], len(layers)),
        tables=tuple(f"blk.{layer}.engram_embd.weight" for layer in layers),
        token_map=tuple(own["engram.token_map"]),
        pad=own["engram.pad_id"],
    )


def _split(flat: list[int], n_layers: int) -> tuple[tuple[int, ...], ...]:
    each = len(flat) // n_layers
    return tuple(tuple(flat[n * each : (n + 1) * each]) for n in range(n_layers))


def _draft(own: Keys) -> DraftShape | None:
    if "block_size" not in own:
        return None
    return DraftShape(
        block=own["block_size"],
        noise_token=own["tokenizer.ggml.mask_token_id"],
        targets=tuple(own["target_layers"]),
    )
