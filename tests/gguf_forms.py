"""Header-only models of V4 and of drafts, stated here from the loaders, and changes to any model.

Nothing of this is read from the tables that files are written by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.gguf.keys import KeyValue, ValueType, array, f32, flag, i32, text, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufFile, GgufTensor
from pipeline.quant.types import TYPES

BLOCK = """
    attn_norm.weight            H
    attn_sinks.weight           HEADS
    attn_q_a.weight             H Q
    attn_q_a_norm.weight        Q
    attn_q_b.weight             Q HEADS*D
    attn_kv.weight              H D
    attn_kv_a_norm.weight       D
    attn_output_a.weight        HEADS*D//GROUPS GROUPS*O
    attn_output_b.weight        GROUPS*O H
    hc_attn_fn.weight           4*H 24
    hc_attn_base.weight         24
    hc_attn_scale.weight        3
    hc_ffn_fn.weight            4*H 24
    hc_ffn_base.weight          24
    hc_ffn_scale.weight         3
    ffn_norm.weight             H
    ffn_gate_inp.weight         H E
    ffn_gate_exps.weight        H F E
    ffn_up_exps.weight          H F E
    ffn_down_exps.weight        F H E
    ffn_gate_shexp.weight       H F
    ffn_up_shexp.weight         H F
    ffn_down_shexp.weight       F H
"""
HASHED = "ffn_gate_tid2eid.weight USED V"
SCORED = "exp_probs_b.bias E"
RATIO_128 = """
    attn_compressor_kv.weight   H D
    attn_compressor_gate.weight H D
    attn_compressor_ape.weight  D 128
    attn_compressor_norm.weight D
"""
RATIO_4 = """
    attn_compressor_kv.weight       H 2*D
    attn_compressor_gate.weight     H 2*D
    attn_compressor_ape.weight      2*D 4
    attn_compressor_norm.weight     D
    indexer.attn_q_b.weight         Q IH*ID
    indexer.proj.weight             H IH
    indexer_compressor_kv.weight    H 2*ID
    indexer_compressor_gate.weight  H 2*ID
    indexer_compressor_ape.weight   2*ID 4
    indexer_compressor_norm.weight  ID
"""
VOCABULARY = """
    token_embd.weight           H V
    output.weight               H V
"""
STREAMS = """
    output_hc_fn.weight         4*H 4
    output_hc_base.weight       4
    output_hc_scale.weight      1
"""
DRAFT = """
    fc.weight                   CAPTURED*H H
    enc.output_norm.weight      H
    markov_w1.weight            RANK V
    markov_w2.weight            RANK V
    conf_proj.weight            H+RANK 1
"""
NORM = "\n    output_norm.weight          H\n"


@dataclass(frozen=True)
class Numbers:
    """Sizes of a model; the defaults are all different, so that no two can be mixed up."""

    hidden: int = 80
    n_heads: int = 3
    head_dim: int = 32
    q_lora: int = 28
    n_groups: int = 2
    o_lora: int = 10
    n_index_heads: int = 5
    index_dim: int = 18
    n_experts: int = 6
    n_used: int = 2
    expert_ff: int = 40
    n_vocab: int = 36
    n_hashed: int = 2
    ratios: tuple[int, ...] = (0, 4, 128, 4, 0)
    captured: tuple[int, ...] = (1, 3, 4)
    rank: int = 12
    block_size: int = 5

    @property
    def words(self) -> dict[str, int]:
        return {
            "H": self.hidden,
            "HEADS": self.n_heads,
            "D": self.head_dim,
            "Q": self.q_lora,
            "GROUPS": self.n_groups,
            "O": self.o_lora,
            "IH": self.n_index_heads,
            "ID": self.index_dim,
            "E": self.n_experts,
            "USED": self.n_used,
            "F": self.expert_ff,
            "V": self.n_vocab,
            "CAPTURED": len(self.captured),
            "RANK": self.rank,
        }


V4_RELEASED = Numbers(
    hidden=4096,
    n_heads=64,
    head_dim=512,
    q_lora=1024,
    n_groups=8,
    o_lora=1024,
    n_index_heads=64,
    index_dim=128,
    n_experts=256,
    n_used=6,
    expert_ff=2048,
    n_vocab=129_280,
    n_hashed=3,
    ratios=(0, 0, *(4, 128) * 20, 4),
    captured=(41, 42, 43),
    rank=256,
)
V41_DRAFT_RELEASED = replace(
    V4_RELEASED,
    hidden=5120,
    q_lora=1280,
    n_index_heads=32,
    n_experts=128,
    n_used=3,
    expert_ff=2304,
    captured=(37, 38, 39),
)


def v4_target(numbers: Numbers | None = None) -> GgufModel:
    n = numbers or Numbers()
    tensors = stated(VOCABULARY + STREAMS + NORM, n)
    for layer, ratio in enumerate(n.ratios):
        router = HASHED if layer < n.n_hashed else SCORED
        compressor = {0: "", 4: RATIO_4, 128: RATIO_128}[ratio]
        tensors |= stated(f"{BLOCK}\n{router}\n{compressor}", n, f"blk.{layer}.")
    keys = (
        *block_keys("deepseek4", n, len(n.ratios)),
        array("deepseek4.attention.compress_ratios", ValueType.INT32, (*n.ratios, 0, 0, 0)),
        u32("deepseek4.hash_layer_count", n.n_hashed),
        *vocabulary_keys(n),
    )
    return header_only("v4.gguf", keys, tensors)


def v4_draft(numbers: Numbers | None = None) -> GgufModel:
    n = numbers or Numbers()
    return header_only("v4-draft.gguf", draft_keys(n), draft_tensors(n) | stated(STREAMS, n))


def v41_draft(numbers: Numbers | None = None) -> GgufModel:
    n = numbers or Numbers()
    flags = (
        flag("dflash.hyper_connection.single_pass", True),
        flag("dflash.dsv41_semantics", True),
    )
    return header_only("v41-draft.gguf", (*draft_keys(n), *flags), draft_tensors(n))


def draft_tensors(n: Numbers) -> dict[str, tuple[int, ...]]:
    tensors = stated(DRAFT + NORM, n)
    for stage in range(3):
        tensors |= stated(BLOCK + SCORED, n, f"blk.{stage}.")
    return tensors


def draft_keys(n: Numbers) -> tuple[KeyValue, ...]:
    return (
        *block_keys("dflash", n, 3),
        array("dflash.attention.compress_ratios", ValueType.INT32, (0, 0, 0)),
        u32("dflash.hash_layer_count", 0),
        u32("dflash.block_size", n.block_size),
        array("dflash.target_layers", ValueType.INT32, n.captured),
        *vocabulary_keys(n),
        u32("tokenizer.ggml.mask_token_id", n.n_vocab - 1),
    )


def block_keys(architecture: str, n: Numbers, n_layers: int) -> tuple[KeyValue, ...]:
    p = f"{architecture}."
    return (
        text("general.architecture", architecture),
        text("general.name", "a model"),
        u32("general.file_type", 38),
        u32("general.quantization_version", 2),
        u32(f"{p}block_count", n_layers),
        u32(f"{p}context_length", 4096),
        u32(f"{p}embedding_length", n.hidden),
        u32(f"{p}vocab_size", n.n_vocab),
        u32(f"{p}attention.head_count", n.n_heads),
        u32(f"{p}attention.head_count_kv", 1),
        u32(f"{p}attention.key_length", n.head_dim),
        u32(f"{p}attention.value_length", n.head_dim),
        f32(f"{p}attention.layer_norm_rms_epsilon", 1e-6),
        u32(f"{p}attention.q_lora_rank", n.q_lora),
        u32(f"{p}attention.sliding_window", 128),
        u32(f"{p}attention.output_group_count", n.n_groups),
        u32(f"{p}attention.output_lora_rank", n.o_lora),
        f32(f"{p}attention.compress_rope_freq_base", 160_000),
        u32(f"{p}attention.indexer.head_count", n.n_index_heads),
        u32(f"{p}attention.indexer.key_length", n.index_dim),
        u32(f"{p}attention.indexer.top_k", 8),
        u32(f"{p}rope.dimension_count", 16),
        f32(f"{p}rope.freq_base", 10_000),
        text(f"{p}rope.scaling.type", "yarn"),
        f32(f"{p}rope.scaling.factor", 16),
        u32(f"{p}rope.scaling.original_context_length", 256),
        f32(f"{p}rope.scaling.yarn_beta_fast", 32),
        f32(f"{p}rope.scaling.yarn_beta_slow", 1),
        u32(f"{p}expert_count", n.n_experts),
        u32(f"{p}expert_used_count", n.n_used),
        u32(f"{p}expert_shared_count", 1),
        u32(f"{p}expert_feed_forward_length", n.expert_ff),
        u32(f"{p}expert_gating_func", 4),
        f32(f"{p}expert_weights_scale", 1.5),
        flag(f"{p}expert_weights_norm", True),
        array(f"{p}swiglu_clamp_exp", ValueType.FLOAT32, [10.0] * n_layers),
        array(f"{p}swiglu_clamp_shexp", ValueType.FLOAT32, [10.0] * n_layers),
        u32(f"{p}hyper_connection.count", 4),
        u32(f"{p}hyper_connection.sinkhorn_iterations", 20),
        f32(f"{p}hyper_connection.epsilon", 1e-6),
    )


def vocabulary_keys(n: Numbers) -> tuple[KeyValue, ...]:
    p = "tokenizer.ggml."
    return (
        text(f"{p}model", "gpt2"),
        text(f"{p}pre", "joyai-llm"),
        array(f"{p}tokens", ValueType.STRING, [f"t{token}" for token in range(n.n_vocab)]),
        array(f"{p}token_type", ValueType.INT32, [1] * n.n_vocab),
        array(f"{p}merges", ValueType.STRING, ["t 1"]),
        u32(f"{p}bos_token_id", 0),
        u32(f"{p}eos_token_id", 1),
        u32(f"{p}padding_token_id", 2),
        flag(f"{p}add_bos_token", False),
        flag(f"{p}add_eos_token", False),
        text("tokenizer.chat_template", "{{ messages }}"),
    )


def stated(table: str, n: Numbers, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Names and dimensions (GGUF order) of a table whose words stand for ``n``."""
    lines = (line.split() for line in table.splitlines() if line.strip())
    return {prefix + name: tuple(eval(word, n.words) for word in ne) for name, *ne in lines}


def header_only(path: str, keys, tensors: dict[str, tuple[int, ...]]) -> GgufModel:
    """One file of F32 tensors, and of I32 ones where ids are stored, with no bytes behind it."""
    types = {name: "I32" if "tid2eid" in name else "F32" for name in tensors}
    made = {name: extra(name, ne, types[name]) for name, ne in tensors.items()}
    entries = {entry.key: entry for entry in keys}
    return GgufModel((GgufFile(Path(path), 0, 3, entries, made, 0, 32),))


def n_weights(model: GgufModel) -> int:
    return sum(math.prod(tensor.ne) for _, tensor in model.tensors.values())


def with_keys(model: GgufModel, *entries: KeyValue, without=()) -> GgufModel:
    first = model.files[0]
    keys = {key: entry for key, entry in first.key_values.items() if key not in without}
    keys |= {entry.key: entry for entry in entries}
    return GgufModel((replace(first, key_values=keys), *model.files[1:]))


def with_tensors(model: GgufModel, *tensors: GgufTensor, without=()) -> GgufModel:
    """Tensors replaced or added (in the first shard), or left out."""
    left = list(tensors)
    files = []
    for file in model.files:
        kept = {name: t for name, t in file.tensors.items() if name not in without}
        for tensor in tuple(left):
            if tensor.name in kept:
                kept[tensor.name] = tensor
                left.remove(tensor)
        files.append(replace(file, tensors=kept))
    files[0] = replace(files[0], tensors={**files[0].tensors, **{t.name: t for t in left}})
    n_tensors = sum(len(file.tensors) for file in files)
    return with_keys(GgufModel(tuple(files)), i32("split.tensors.count", n_tensors))


def tensor(model: GgufModel, name: str, **changes) -> GgufTensor:
    return replace(model.tensors[name][1], **changes)


def extra(name: str, ne: tuple[int, ...] = (4,), type_name: str = "F32") -> GgufTensor:
    return GgufTensor(name, ne, TYPES[type_name], 0, 16)
