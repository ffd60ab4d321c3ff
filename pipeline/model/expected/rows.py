"""Rows of the tensor tables, what a row stores, and the rows that every block of both models has.

A row is (name under its block, codec, shape in weights). FP8 and FP4 rows give the stem of a pair
``X.weight`` + ``X.scale``; all other rows give the stored name itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.model.config import ModelConfig
from pipeline.source.decode import FP4_GROUP
from pipeline.source.scale_block import scale_shape
from pipeline.source.spec import Codec, TensorSpec

Row = tuple[str, Codec, tuple[int, ...]]

_PLAIN_DTYPES = {Codec.BF16: "BF16", Codec.F32: "F32", Codec.I64: "I64"}


def stored(prefix: str, rows: Iterable[Row], block: tuple[int, int]) -> Iterator[TensorSpec]:
    """The stored tensors of ``rows`` under ``prefix``; ``block`` is the scale block of FP8."""
    for name, codec, shape in rows:
        full = prefix + name
        if codec is Codec.FP8:
            yield TensorSpec(f"{full}.weight", "F8_E4M3", shape)
            yield TensorSpec(f"{full}.scale", "F8_E8M0", scale_shape(shape[0], shape[1], block))
        elif codec is Codec.FP4:
            yield TensorSpec(f"{full}.weight", "I8", (shape[0], shape[1] // 2))
            yield TensorSpec(
                f"{full}.scale", "F8_E8M0", scale_shape(shape[0], shape[1], (1, FP4_GROUP))
            )
        else:
            yield TensorSpec(full, _PLAIN_DTYPES[codec], shape)


def attention_rows(c: ModelConfig) -> tuple[Row, ...]:
    """Low-rank queries, one shared key-value head, grouped low-rank output."""
    group_width = c.n_heads * c.head_dim // c.o_groups
    return (
        ("attn.wq_a", Codec.FP8, (c.q_lora, c.hidden)),
        ("attn.wq_b", Codec.FP8, (c.n_heads * c.head_dim, c.q_lora)),
        ("attn.wkv", Codec.FP8, (c.n_kv_heads * c.head_dim, c.hidden)),
        ("attn.wo_a", Codec.FP8, (c.o_groups * c.o_lora, group_width)),
        ("attn.wo_b", Codec.FP8, (c.hidden, c.o_groups * c.o_lora)),
        ("attn.q_norm.weight", Codec.BF16, (c.q_lora,)),
        ("attn.kv_norm.weight", Codec.BF16, (c.head_dim,)),
        ("attn.attn_sink", Codec.F32, (c.n_heads,)),
        ("attn_norm.weight", Codec.BF16, (c.hidden,)),
        ("ffn_norm.weight", Codec.BF16, (c.hidden,)),
    )


def hyper_connection_rows(c: ModelConfig) -> tuple[Row, ...]:
    """Mixing of the ``hc_mult`` residual streams around attention and around the experts."""
    n_mixes = c.hc_mult * (c.hc_mult + 2)
    return tuple(
        row
        for part in ("attn", "ffn")
        for row in (
            (f"hc_{part}_fn", Codec.F32, (n_mixes, c.hc_mult * c.hidden)),
            (f"hc_{part}_base", Codec.F32, (n_mixes,)),
            (f"hc_{part}_scale", Codec.F32, (3,)),
        )
    )


def expert_rows(c: ModelConfig, n_experts: int) -> tuple[Row, ...]:
    """Routed experts (FP4) and the shared one (FP8): w1 gate, w3 up, w2 down."""
    up, down = (c.expert_ff, c.hidden), (c.hidden, c.expert_ff)
    shapes = {"w1": up, "w2": down, "w3": up}
    shared_ff = c.expert_ff * c.n_shared_experts
    return (
        *(
            (f"ffn.experts.{expert}.{part}", Codec.FP4, shape)
            for expert in range(n_experts)
            for part, shape in shapes.items()
        ),
        ("ffn.shared_experts.w1", Codec.FP8, (shared_ff, c.hidden)),
        ("ffn.shared_experts.w2", Codec.FP8, (c.hidden, shared_ff)),
        ("ffn.shared_experts.w3", Codec.FP8, (shared_ff, c.hidden)),
    )


def draft_input_rows(c: ModelConfig) -> tuple[Row, ...]:
    """What the first draft stage has more: it reads the captured layers side by side."""
    return (
        ("main_proj", Codec.FP8, (c.hidden, len(c.draft.target_layers) * c.hidden)),
        ("main_norm.weight", Codec.BF16, (c.hidden,)),
    )


def draft_output_rows(c: ModelConfig, markov_names: tuple[str, str]) -> tuple[Row, ...]:
    """What the last draft stage has more: its norm, the Markov pair and the confidence head."""
    markov = (c.vocab_size, c.draft.markov_rank)
    return (
        ("norm.weight", Codec.BF16, (c.hidden,)),
        *((f"markov_head.{name}.weight", Codec.BF16, markov) for name in markov_names),
        ("confidence_head.proj.weight", Codec.BF16, (1, c.hidden + c.draft.markov_rank)),
    )


def global_rows(c: ModelConfig) -> tuple[Row, ...]:
    """Token embedding, output head (untied) and the last norm."""
    return (
        ("embed.weight", Codec.BF16, (c.vocab_size, c.hidden)),
        ("head.weight", Codec.BF16, (c.vocab_size, c.hidden)),
        ("norm.weight", Codec.BF16, (c.hidden,)),
    )
