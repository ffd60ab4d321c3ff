"""The inventory: every tensor of the output with its exact place, for tools that place weights.

A superset of the array that the placement planner reads (midagedev/bloomery, `inv.json`): its six
keys stay as they are. With `offset`, `type` and, for stacks, `expert_bytes`, an engine needs no
GGUF parser to read one expert or one engram row. Every figure is the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from pipeline.errors import PlanError, VerifyError
from pipeline.model.config import ModelConfig
from pipeline.model.roles import ReadMode
from pipeline.plan import PAGE, Plan, PlannedShard, PlannedTensor, per_token_nbytes

SCHEMA = 1


def inventory(
    plan: Plan,
    digests: Mapping[str, str] | None = None,
    shard_digests: Sequence[str] | None = None,
    *,
    source: Mapping[str, object] | None = None,
    recipe: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """``<name>.inventory.json`` as an object: sizes in bytes, offsets absolute in the shard file.

    Args:
        plan: What the files are.
        digests: Hex sha256 of every tensor's bytes by GGUF name; without it they are null.
        shard_digests: Hex sha256 of every file in shard order; without it they are null.
        source: Where the checkpoint came from, as the manifest says it.
        recipe: What the output was asked to be, as the manifest says it.

    Raises:
        VerifyError: The digests are not those of exactly this plan's tensors and shards.
        PlanError: The metadata names no architecture.
    """
    _check_digests(plan, digests, shard_digests)
    files: Sequence[str | None] = shard_digests or [None] * len(plan.shards)
    tensors = _in_planner_order(plan)
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "layout": plan.layout.value if plan.layout else None,
        "arch": _architecture(plan),
        "hparams": _hparams(plan.config),
        "source": dict(source or {}),
        "recipe": dict(recipe or {}),
        "n_tensors": len(tensors),
        "tensor_bytes": plan.data_nbytes,
        "file_bytes": plan.nbytes,
        "shards": [_shard(s, digest) for s, digest in zip(plan.shards, files, strict=True)],
        "engram": list(_engram_rows(plan)),
        "tensors": [_tensor(t, plan.config, (digests or {}).get(t.name)) for t in tensors],
    }


def planner_array(plan: Plan) -> list[dict[str, object]]:
    """The planner's own array: six keys a tensor, by block and name, block-less tensors last."""
    return [_six_keys(tensor) for tensor in _in_planner_order(plan)]


def _check_digests(
    plan: Plan, digests: Mapping[str, str] | None, shard_digests: Sequence[str] | None
) -> None:
    names = {tensor.name for tensor in plan.tensors}
    if digests is not None and set(digests) != names:
        odd = sorted(names.symmetric_difference(digests))
        raise VerifyError("the tensor digests are not those of this plan", tensor=odd[0])
    if shard_digests is not None and len(shard_digests) != len(plan.shards):
        raise VerifyError(
            "the shard digests are not those of this plan",
            expected=len(plan.shards),
            found=len(shard_digests),
        )


def _architecture(plan: Plan) -> str:
    for entry in plan.key_values:
        if entry.key == "general.architecture":
            return str(entry.value)
    raise PlanError("the metadata lacks general.architecture")


def _in_planner_order(plan: Plan) -> list[PlannedTensor]:
    def order(tensor: PlannedTensor) -> tuple[bool, int, str]:
        layer = tensor.target.layer
        return layer is None, layer or 0, tensor.name

    return sorted(plan.tensors, key=order)


def _six_keys(tensor: PlannedTensor) -> dict[str, object]:
    return {
        "block": tensor.target.layer,
        "name": tensor.name,
        "dims": list(reversed(tensor.target.shape)),
        "ty": tensor.type.planner_name,
        "bytes": tensor.nbytes,
        "shard": tensor.shard,
    }


def _tensor(tensor: PlannedTensor, config: ModelConfig, digest: str | None) -> dict[str, object]:
    target = tensor.target
    return {
        **_six_keys(tensor),
        "type": tensor.type.name,
        "type_id": tensor.type.type_id,
        "offset": tensor.offset,
        "role": target.role.value,
        "sub_role": target.sub_role.value,
        "rows": target.n_rows,
        "row_bytes": tensor.row_nbytes,
        **_expert_keys(tensor),
        "read": target.read_mode.value,
        "per_token_bytes": per_token_nbytes(target, tensor.nbytes, config),
        "page_aligned": tensor.offset % PAGE == 0,
        "sha256": digest,
    }


def _expert_keys(tensor: PlannedTensor) -> dict[str, object]:
    """Expert ``e`` of a stack: ``expert_bytes`` from ``offset + e * expert_bytes``."""
    if tensor.target.read_mode is not ReadMode.SPARSE:
        return {}
    n_experts = tensor.target.shape[0]
    return {
        "n_expert": n_experts,
        "expert_rows": tensor.target.n_rows // n_experts,
        "expert_bytes": tensor.nbytes // n_experts,
    }


def _shard(shard: PlannedShard, digest: str | None) -> dict[str, object]:
    return {
        "no": shard.no,
        "file": shard.file_name,
        "kind": shard.kind,
        "nbytes": shard.nbytes,
        "data_offset": len(shard.header),
        "alignment": shard.alignment,
        "n_tensors": len(shard.tensors),
        "sha256": digest,
    }


def _engram_rows(plan: Plan) -> Iterator[dict[str, object]]:
    """Where each engram layer's rows are: the same look-up for both layouts."""
    engram = plan.config.engram
    if engram is None:
        return
    tables = [tensor for tensor in plan.tensors if tensor.target.is_table]
    parts = [
        (table, first, matrix.n_rows)
        for table in sorted(tables, key=lambda table: table.target.layer or 0)
        for matrix, first in zip(table.target.matrices, _first_rows(table), strict=True)
    ]
    for layer, (table, first, n_rows) in zip(engram.layers, parts, strict=True):
        yield {
            "layer": layer,
            "tensor": table.name,
            "shard": table.shard,
            "offset": table.offset + first * table.row_nbytes,
            "first_row": first,
            "rows": n_rows,
            "row_bytes": table.row_nbytes,
            "rows_per_token": engram.n_columns,
        }


def _first_rows(table: PlannedTensor) -> list[int]:
    sizes = [matrix.n_rows for matrix in table.target.matrices]
    return list(accumulate(sizes, initial=0))[:-1]


def _hparams(config: ModelConfig) -> dict[str, object]:
    """The sizes a placement reckons with, under the names that GGUF tools use for them."""
    return {
        "n_layer": config.n_layers,
        "n_embd": config.hidden,
        "n_vocab": config.vocab_size,
        "n_head": config.n_heads,
        "n_head_kv": config.n_kv_heads,
        "head_dim": config.head_dim,
        "n_expert": config.n_experts,
        "n_expert_used": config.n_experts_used,
        "n_expert_shared": config.n_shared_experts,
        "n_ff_exp": config.expert_ff,
        "n_ctx_train": config.context,
        "sliding_window": config.sliding_window,
        "compress_ratios": list(config.layer_ratios),
        "kv_source_layers": list(config.kv_sources),
        "index_source_layers": list(config.index_sources),
        "index_head": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_top_k": config.index_top_k,
        "hc_mult": config.hc_mult,
    }
