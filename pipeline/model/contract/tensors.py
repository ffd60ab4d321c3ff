"""Every tensor that a loader asks for, with the dimensions and types it takes, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor
from pipeline.model.contract.shapes import Ne
from pipeline.model.contract.shapes_draft import v4_draft_shapes, v41_draft_shapes
from pipeline.model.contract.shapes_v4 import v4_shapes
from pipeline.model.contract.shapes_v41 import fork_shapes, mainline_shapes
from pipeline.model.contract.sizes import Sizes
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form

_SHAPES: Mapping[Form, Callable[[Sizes], Mapping[str, Ne]]] = {
    V41_MAINLINE: mainline_shapes,
    V41_FORK: fork_shapes,
    V4_TARGET: v4_shapes,
    V41_DRAFT: v41_draft_shapes,
    V4_DRAFT: v4_draft_shapes,
}

_IMAGE_BIAS = re.compile(r"blk\.\d+\.exp_probs_b_vl\.bias")
_VOCABULARY = re.compile(r"(token_embd|output)\.weight")

_ONE_TYPE = (
    (
        re.compile(
            r".*(_norm|\.attn_sinks|\.hc_(attn|ffn)_(base|scale)|output_hc_(base|scale)"
            r"|\.engram_gate)\.weight|.*\.bias"
        ),
        "F32",
    ),
    (re.compile(r".*\.ffn_gate_tid2eid\.weight"), "I32"),
)
"""Other types load, then decoding aborts."""

_MAINLINE_TYPE_IDS = range(44)
"""mainline's loader: "invalid ggml type 139. should be in [0, 44)"."""

_EXTRA_CAUSES = (
    (r"output_hc_", "V4.1 has no output hyper-connection (V4 had one)."),
    (r"(mtp|nextn)\.|.*\.nextn\.", "The MTP module is a file of its own."),
    (r".*exp_probs_b\.bias", "A hash-routed layer looks its experts up by token, without a bias."),
    (r".*exp_probs_b_vl", "No draft loader knows the router bias of image tokens."),
    (r".*tid2eid", "hash_layer_count says that this layer chooses experts by score."),
    (r".*(compressor|indexer)", "The layer is no source of this kind, or has no use for it."),
    (r".*engram|per_layer_token_embd", "It is none of the engram tensors of this form."),
)

_STAGE = "A DSpark stage is no layer: it belongs in the draft, a file of its own."


def check_tensors(model: GgufModel, sizes: Sizes, form: Form) -> Iterator[FormatError]:
    """A problem for each tensor that is missing, one too many, or of a wrong shape or type."""
    found = {name: tensor for name, (_, tensor) in model.tensors.items()}
    wanted = expected_ne(sizes, form)
    for name, ne in wanted.items():
        if name in found:
            yield from _check_tensor(found[name], ne, form)
        elif not _is_optional(name, form):
            yield _missing(name, ne, sizes)
    for name in found:
        if name not in wanted:
            yield _extra(name, sizes, form)


def expected_ne(sizes: Sizes, form: Form) -> Mapping[str, Ne]:
    """Name and dimensions of all tensors of a file of these sizes, optional ones among them."""
    return _SHAPES[form](sizes)


def _is_optional(name: str, form: Form) -> bool:
    """The router bias of image tokens; in a draft, embedding and head, which a target lends it."""
    rule = _VOCABULARY if form.is_draft else _IMAGE_BIAS
    return rule.fullmatch(name) is not None


def _check_tensor(tensor: GgufTensor, ne: Ne, form: Form) -> Iterator[FormatError]:
    if tensor.ne != ne:
        yield FormatError(
            "the tensor has another shape than the file's own keys imply",
            tensor=tensor.name,
            expected=ne,
            found=tensor.ne,
        )
    for rule, only_type in _ONE_TYPE:
        if rule.fullmatch(tensor.name) and tensor.type.name != only_type:
            yield FormatError(
                f"the tensor must be {only_type}; with another type the file loads and "
                "decoding aborts",
                tensor=tensor.name,
                expected=only_type,
                found=tensor.type.name,
            )
    if form == V41_MAINLINE and tensor.type.type_id not in _MAINLINE_TYPE_IDS:
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


def _extra(name: str, sizes: Sizes, form: Form) -> FormatError:
    block = re.match(r"blk\.(\d+)\.", name)
    if block and int(block[1]) >= sizes.n_layers:
        cause = f"block_count is {sizes.n_layers}: layers count from 0 to {sizes.n_layers - 1}."
        cause = cause if form.is_draft else f"{cause} {_STAGE}"
    else:
        causes = (cause for rule, cause in _EXTRA_CAUSES if re.match(rule, name))
        cause = next(causes, "No loader of this form knows it.")
    return FormatError(
        "there is a tensor too many, and loaders refuse a wrong number of tensors",
        tensor=name,
        next_step=cause,
    )
