"""Dimensions of the tensors that a block has in every form. GGUF order.

Stated a second time on purpose, from the loaders and not from the tables that files are written
by: llama.cpp src/models/deepseek4.cpp (pull request 24162), which V4.1's loaders build on.
"""

from __future__ import annotations

from pipeline.model.contract.sizes import Sizes

Ne = tuple[int, ...]


def named(layer: int, parts: dict[str, Ne]) -> dict[str, Ne]:
    """``parts`` of a layer under their whole names."""
    return {f"blk.{layer}.{part}": ne for part, ne in parts.items()}


def block(s: Sizes) -> dict[str, Ne]:
    """The 23 tensors of any layer or stage: attention, hyper-connection, feed-forward."""
    return {**_attention(s), **_hyper_connection(s), **_feed_forward(s)}


def vocabulary(s: Sizes) -> dict[str, Ne]:
    """Embedding and head of a target; a draft that has none borrows its target's."""
    return {
        "token_embd.weight": (s.hidden, s.n_vocab),
        "output.weight": (s.hidden, s.n_vocab),
    }


def stream_head(s: Sizes) -> dict[str, Ne]:
    """What makes one of the residual streams at the end of a V4 model."""
    return {
        "output_hc_fn.weight": (s.n_streams * s.hidden, s.n_streams),
        "output_hc_base.weight": (s.n_streams,),
        "output_hc_scale.weight": (1,),
    }


def bias(s: Sizes) -> dict[str, Ne]:
    """The router's bias, of layers that choose experts by score."""
    return {"exp_probs_b.bias": (s.n_experts,)}


def image_bias(s: Sizes) -> dict[str, Ne]:
    """The router's bias for image tokens."""
    return {"exp_probs_b_vl.bias": (s.n_experts,)}


def _attention(s: Sizes) -> dict[str, Ne]:
    width = s.n_heads * s.head_dim
    return {
        "attn_norm.weight": (s.hidden,),
        "attn_sinks.weight": (s.n_heads,),
        "attn_q_a.weight": (s.hidden, s.q_lora),
        "attn_q_a_norm.weight": (s.q_lora,),
        "attn_q_b.weight": (s.q_lora, width),
        "attn_kv.weight": (s.hidden, s.head_dim),
        "attn_kv_a_norm.weight": (s.head_dim,),
        "attn_output_a.weight": (width // max(1, s.o_groups), s.o_groups * s.o_lora),
        "attn_output_b.weight": (s.o_groups * s.o_lora, s.hidden),
    }


def _hyper_connection(s: Sizes) -> dict[str, Ne]:
    n_mixes = s.n_streams * (2 + s.n_streams)
    return {
        name: ne
        for part in ("attn", "ffn")
        for name, ne in (
            (f"hc_{part}_fn.weight", (s.n_streams * s.hidden, n_mixes)),
            (f"hc_{part}_base.weight", (n_mixes,)),
            (f"hc_{part}_scale.weight", (3,)),
        )
    }


def _feed_forward(s: Sizes) -> dict[str, Ne]:
    shared_ff = s.n_shared * s.expert_ff
    return {
        "ffn_norm.weight": (s.hidden,),
        "ffn_gate_inp.weight": (s.hidden, s.n_experts),
        "ffn_gate_exps.weight": (s.hidden, s.expert_ff, s.n_experts),
        "ffn_down_exps.weight": (s.expert_ff, s.hidden, s.n_experts),
        "ffn_up_exps.weight": (s.hidden, s.expert_ff, s.n_experts),
        "ffn_gate_shexp.weight": (s.hidden, shared_ff),
        "ffn_up_shexp.weight": (s.hidden, shared_ff),
        "ffn_down_shexp.weight": (shared_ff, s.hidden),
    }
