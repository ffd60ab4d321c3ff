"""Constants of a checkpoint, from its config.json and tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tests.reference.engram_rows import multipliers_of, offsets_of, primes_from
from tests.reference.hyperparameters import (
    Candidates,
    DraftShape,
    EngramHash,
    Hyperparameters,
    Yarn,
)
from tests.reference.token_map import token_map

Config = dict


def trunk(folder: Path) -> Hyperparameters:
    """The trunk's constants."""
    c = _text_config(folder)
    return Hyperparameters(
        **_common(c, c["num_hidden_layers"]),
        ratios=tuple(c["compress_ratios"][: c["num_hidden_layers"]]),
        kv_sources=tuple(c["kv_source_layer_ids"]),
        index_sources=tuple(c["index_source_layer_ids"]),
        candidates=Candidates(
            source=c["candidate_source_layer_id"],
            block=c["candidate_block_size"],
            count=c["candidate_topk_blocks"],
        ),
        n_experts=c["n_routed_experts"],
        n_experts_used=c["num_experts_per_tok"],
        engram=_engram(c, folder / "tokenizer.json"),
    )


def draft(folder: Path) -> Hyperparameters:
    """The draft's constants: its stages are window layers with experts of their own."""
    c = _text_config(folder)
    n_stages = len(c["compress_ratios"]) - c["num_hidden_layers"]
    return Hyperparameters(
        **_common(c, n_stages),
        ratios=(0,) * n_stages,
        kv_sources=(),
        index_sources=(),
        candidates=None,
        n_experts=c["dspark_n_routed_experts"],
        n_experts_used=c["dspark_num_experts_per_tok"],
        draft=DraftShape(
            block=c["dspark_block_size"],
            noise_token=c["dspark_noise_token_id"],
            targets=tuple(c["dspark_target_layer_ids"]),
        ),
    )


def _text_config(folder: Path) -> Config:
    return json.loads((folder / "config.json").read_bytes())["text_config"]


def _common(c: Config, n_layers: int) -> Config:
    assert c["scoring_func"] == "sqrtsoftplus"
    scaling = c["rope_scaling"]
    return {
        "n_layers": n_layers,
        "vocab_size": c["vocab_size"],
        "n_heads": c["num_attention_heads"],
        "head_dim": c["head_dim"],
        "rotary_dim": c["qk_rope_head_dim"],
        "o_groups": c["o_groups"],
        "window": c["sliding_window"],
        "rms_eps": c["rms_norm_eps"],
        "rope_base": float(c["rope_theta"]),
        "compressed_rope_base": float(c["compress_rope_theta"]),
        "yarn": Yarn(
            factor=scaling["factor"],
            original_context=scaling["original_max_position_embeddings"],
            beta_fast=scaling["beta_fast"],
            beta_slow=scaling["beta_slow"],
        ),
        "index_heads": c["index_n_heads"],
        "index_dim": c["index_head_dim"],
        "index_top_k": c["index_topk"],
        "weights_scale": c["routed_scaling_factor"],
        "normalise_weights": c["norm_topk_prob"],
        "clamps": (c["swiglu_limit"],) * n_layers,
        "shared_clamps": (c["swiglu_limit"],) * n_layers,
        "n_streams": c["hc_mult"],
        "hc_eps": c["hc_eps"],
        "sinkhorn_passes": c["hc_sinkhorn_iters"],
    }


def _engram(c: Config, tokenizer_json: Path) -> EngramHash:
    layers, n_orders = c["engram_layer_ids"], c["engram_max_ngram_size"] - 1
    n_heads = c["engram_n_heads"]
    primes = primes_from(c["engram_vocab_size"], len(layers), n_orders, n_heads)
    mapped = token_map(tokenizer_json, c["vocab_size"])
    n_compressed = max(mapped) + 1
    assert n_compressed == c["engram_compressed_vocab_size"]
    return EngramHash(
        layers=tuple(layers),
        n_heads=n_heads,
        multipliers=tuple(
            tuple(multipliers_of(layer, n_compressed, n_orders + 1)) for layer in layers
        ),
        primes=tuple(map(tuple, primes)),
        offsets=tuple(tuple(offsets_of(of_layer)) for of_layer in primes),
        tables=tuple(f"blk.{layer}.engram_embd.weight" for layer in layers),
        token_map=tuple(mapped),
        pad=mapped[c["engram_pad_token_id"]],
    )
