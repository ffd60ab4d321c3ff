"""Every tensor that a loader asks for, with the dimensions that the file's own keys imply.

Stated a second time on purpose, from the loaders and not from the tables that files are written
by: llama.cpp src/models/deepseek41.cpp (pull request 30817) for the mainline layout, pull request
28696 and ik_llama.cpp pull request 2455 for the fork layout. Dimensions are in GGUF order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor
from pipeline.model.contract.sizes import Sizes
from pipeline.model.layout import Layout

Ne = tuple[int, ...]

_OPTIONAL = re.compile(r"blk\.\d+\.exp_probs_b_vl\.bias")
"""The router bias of image tokens."""

_F32_ONLY = re.compile(
    r".*(_norm|\.attn_sinks|\.hc_(attn|ffn)_(base|scale)|\.engram_gate)\.weight|.*\.bias"
)
"""Other types load, then decoding aborts."""

_MAINLINE_TYPE_IDS = range(44)
"""mainline's loader: "invalid ggml type 139. should be in [0, 44)"."""

_EXTRA_CAUSES = (
    (r"output_hc_", "V4.1 has no output hyper-connection (V4 had one)."),
    (r"(mtp|nextn)\.|.*\.nextn\.", "The MTP module is a file of its own."),
    (r".*(compressor|indexer)", "The layer is no source of this kind, or has no use for it."),
    (r".*engram|per_layer_token_embd", "It is none of this layout's engram tensors."),
)


def check_tensors(model: GgufModel, sizes: Sizes, layout: Layout) -> Iterator[FormatError]:
    """A problem for each tensor that is missing, one too many, or of a wrong shape or type."""
    found = {name: tensor for name, (_, tensor) in model.tensors.items()}
    wanted = expected_ne(sizes, layout)
    for name, ne in wanted.items():
        if name in found:
            yield from _check_tensor(found[name], ne, layout)
        elif not _OPTIONAL.fullmatch(name):
            yield _missing(name, ne, sizes)
    for name in found:
        if name not in wanted:
            yield _extra(name, sizes)


def expected_ne(sizes: Sizes, layout: Layout) -> Mapping[str, Ne]:
    """Name and dimensions of all tensors of a file of these sizes."""
    wanted: dict[str, Ne] = {
        "token_embd.weight": (sizes.hidden, sizes.n_vocab),
        "output_norm.weight": (sizes.hidden,),
        "output.weight": (sizes.hidden, sizes.n_vocab),
    }
    for layer in range(sizes.n_layers):
        parts = {
            **_attention(sizes),
            **_hyper_connection(sizes),
            **_feed_forward(sizes),
            **(_kv_source(sizes, layer) if layer in sizes.kv_sources else {}),
            **(_index_source(sizes) if layer in sizes.index_sources else {}),
        }
        wanted |= {f"blk.{layer}.{part}": ne for part, ne in parts.items()}
    return wanted | _engram(sizes, layout)


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
        "exp_probs_b.bias": (s.n_experts,),
        "exp_probs_b_vl.bias": (s.n_experts,),
        "ffn_gate_exps.weight": (s.hidden, s.expert_ff, s.n_experts),
        "ffn_down_exps.weight": (s.expert_ff, s.hidden, s.n_experts),
        "ffn_up_exps.weight": (s.hidden, s.expert_ff, s.n_experts),
        "ffn_gate_shexp.weight": (s.hidden, shared_ff),
        "ffn_up_shexp.weight": (s.hidden, shared_ff),
        "ffn_down_shexp.weight": (shared_ff, s.hidden),
    }


def _kv_source(s: Sizes, layer: int) -> dict[str, Ne]:
    parts: dict[str, Ne] = {
        "attn_compressor_kv.weight": (s.hidden, s.head_dim),
        "attn_compressor_norm.weight": (s.head_dim,),
        "indexer.attn_k.weight": (s.head_dim, s.index_dim),
        "indexer.k_norm.weight": (s.index_dim,),
    }
    # Pooling one token is no pooling: such a source has no gate.
    if layer < len(s.ratios) and s.ratios[layer] != 1:
        parts["attn_compressor_gate.weight"] = (s.hidden, s.head_dim)
    return parts


def _index_source(s: Sizes) -> dict[str, Ne]:
    return {
        "indexer.attn_q_b.weight": (s.q_lora, s.n_index_heads * s.index_dim),
        "indexer.proj.weight": (s.hidden, s.n_index_heads),
    }


def _engram(s: Sizes, layout: Layout) -> dict[str, Ne]:
    engram = s.engram
    # One key per stream, then the value.
    projection = (engram.n_columns * engram.width, (s.n_streams + 1) * s.hidden)
    vectors = (s.hidden, s.n_streams)
    wanted: dict[str, Ne] = {}
    if layout is Layout.MAINLINE:
        wanted["per_layer_token_embd.weight"] = (engram.width, sum(engram.n_rows))
    for layer, n_rows in zip(engram.layers, engram.n_rows, strict=True):
        if layout is Layout.MAINLINE:
            parts = {"engram_kv": projection, "engram_gate": vectors}
        else:
            table = (engram.width, n_rows)
            parts = {"engram_embd": table, "engram_wkv": projection}
            parts |= {"engram_q": vectors, "engram_k": vectors}
        wanted |= {f"blk.{layer}.{part}.weight": ne for part, ne in parts.items()}
    return wanted


def _check_tensor(tensor: GgufTensor, ne: Ne, layout: Layout) -> Iterator[FormatError]:
    if tensor.ne != ne:
        yield FormatError(
            "the tensor has another shape than the file's own keys imply",
            tensor=tensor.name,
            expected=ne,
            found=tensor.ne,
        )
    if _F32_ONLY.fullmatch(tensor.name) and tensor.type.name != "F32":
        yield FormatError(
            "the tensor must be F32; with another type the file loads and decoding aborts",
            tensor=tensor.name,
            expected="F32",
            found=tensor.type.name,
        )
    if layout is Layout.MAINLINE and tensor.type.type_id not in _MAINLINE_TYPE_IDS:
        yield FormatError(
            "the tensor has a type that mainline llama.cpp does not know",
            tensor=tensor.name,
            expected=f"a type id below {_MAINLINE_TYPE_IDS.stop}",
            found=f"{tensor.type.name} ({tensor.type.type_id})",
            next_step="Types of ik_llama.cpp go with the fork layout.",
        )


def _missing(name: str, ne: Ne, sizes: Sizes) -> FormatError:
    if name.endswith("attn_compressor_gate.weight"):
        layer = int(name.split(".")[1])
        what = f"layer {layer} pools at ratio {sizes.ratios[layer]} and has no pooling gate"
        return FormatError(what, tensor=name, expected=ne)
    return FormatError("a tensor is missing", tensor=name, expected=ne)


def _extra(name: str, sizes: Sizes) -> FormatError:
    block = re.match(r"blk\.(\d+)\.", name)
    if block and int(block[1]) >= sizes.n_layers:
        cause = f"block_count is {sizes.n_layers}: layers count from 0 to {sizes.n_layers - 1}."
    else:
        causes = (cause for rule, cause in _EXTRA_CAUSES if re.match(rule, name))
        cause = next(causes, "No loader of this layout knows it.")
    return FormatError(
        "there is a tensor too many, and loaders refuse a wrong number of tensors",
        tensor=name,
        next_step=cause,
    )
