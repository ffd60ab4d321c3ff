"""The table that maps checkpoint names to GGUF names, for the blocks of all models.

Which layers have which tensors is not repeated here: a row applies wherever the checkpoint has its
source. Names and the one-type constraints are those that the loaders ask for: `deepseek41`
(llama.cpp pull request 30817 for the mainline layout, ik_llama.cpp pull request 2455 for the fork
layout), `deepseek4` (pull request 24162) and `dflash` (pull request 25784).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.config import ModelConfig
from pipeline.model.targets.tensor import TargetTensor, matrix_ref
from pipeline.source.spec import Codec, Picks, TensorSpec

F32, I32 = "F32", "I32"


@dataclass(frozen=True, slots=True)
class Row:
    """GGUF name and source name of one tensor (``{e}``: one matrix per expert)."""

    target: str
    source: str
    only_type: str | None = None


BLOCK_ROWS = (
    Row("attn_norm.weight", "attn_norm.weight", F32),
    Row("attn_q_a.weight", "attn.wq_a.weight"),
    Row("attn_q_a_norm.weight", "attn.q_norm.weight", F32),
    Row("attn_q_b.weight", "attn.wq_b.weight"),
    Row("attn_kv.weight", "attn.wkv.weight"),
    Row("attn_kv_a_norm.weight", "attn.kv_norm.weight", F32),
    Row("attn_sinks.weight", "attn.attn_sink", F32),
    Row("attn_output_a.weight", "attn.wo_a.weight"),
    Row("attn_output_b.weight", "attn.wo_b.weight"),
    Row("attn_compressor_kv.weight", "attn.compressor.wkv.weight"),
    Row("attn_compressor_gate.weight", "attn.compressor.wgate.weight"),
    # Added to float32 rows; llama.cpp's converter keeps it, and half a megabyte is not worth less.
    Row("attn_compressor_ape.weight", "attn.compressor.ape", F32),
    Row("attn_compressor_norm.weight", "attn.compressor.norm.weight", F32),
    Row("indexer.attn_k.weight", "attn.indexer.wk.weight"),
    Row("indexer.k_norm.weight", "attn.indexer.k_norm.weight", F32),
    Row("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight"),
    Row("indexer.proj.weight", "attn.indexer.weights_proj.weight"),
    Row("indexer_compressor_kv.weight", "attn.indexer.compressor.wkv.weight"),
    Row("indexer_compressor_gate.weight", "attn.indexer.compressor.wgate.weight"),
    Row("indexer_compressor_ape.weight", "attn.indexer.compressor.ape", F32),
    Row("indexer_compressor_norm.weight", "attn.indexer.compressor.norm.weight", F32),
    Row("hc_attn_fn.weight", "hc_attn_fn"),
    Row("hc_attn_base.weight", "hc_attn_base", F32),
    Row("hc_attn_scale.weight", "hc_attn_scale", F32),
    Row("hc_ffn_fn.weight", "hc_ffn_fn"),
    Row("hc_ffn_base.weight", "hc_ffn_base", F32),
    Row("hc_ffn_scale.weight", "hc_ffn_scale", F32),
    Row("ffn_norm.weight", "ffn_norm.weight", F32),
    Row("ffn_gate_inp.weight", "ffn.gate.weight"),
    Row("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", I32),
    Row("exp_probs_b.bias", "ffn.gate.bias", F32),
    Row("exp_probs_b_vl.bias", "ffn.gate.bias_vl", F32),
    Row("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight"),
    Row("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight"),
    Row("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight"),
    Row("ffn_gate_exps.weight", "ffn.experts.{e}.w1.weight"),
    Row("ffn_up_exps.weight", "ffn.experts.{e}.w3.weight"),
    Row("ffn_down_exps.weight", "ffn.experts.{e}.w2.weight"),
)
"""One transformer block, of the trunk or of the draft, of either model."""

STREAM_HEAD_ROWS = (
    Row("output_hc_fn.weight", "hc_head_fn"),
    Row("output_hc_base.weight", "hc_head_base", F32),
    Row("output_hc_scale.weight", "hc_head_scale", F32),
)
"""What mixes the residual streams into one at the end; V4 only."""


ROUTED_ENTRIES = frozenset({"ffn.gate.weight", "ffn.gate.bias", "ffn.gate.bias_vl"})
"""Sources with one entry per routed expert along their first axis."""


def tensor_of(
    row: Row,
    specs: Mapping[str, TensorSpec],
    config: ModelConfig,
    *,
    prefix: str = "",
    layer: int | None = None,
    keep: tuple[int, ...] | None = None,
    is_draft: bool = False,
) -> TargetTensor:
    """The tensor that ``row`` gives from the stored tensors under ``prefix``.

    ``config`` gives scale blocks and, for stacks, the number of experts; ``keep`` names the experts
    of this layer that stay, in their new order.
    """
    is_stack = "{e}" in row.source
    experts = tuple(range(config.n_experts)) if keep is None else keep
    names = [prefix + row.source.format(e=expert) for expert in (experts if is_stack else (0,))]
    picks = Picks(experts, config.n_experts) if keep and row.source in ROUTED_ENTRIES else None
    matrices = tuple(matrix_ref(specs[name], config, picks) for name in names)
    one = matrices[0]
    shape = (one.n_rows, one.n_cols) if len(specs[names[0]].shape) > 1 else (one.n_cols,)
    return TargetTensor(
        name=row.target if layer is None else f"blk.{layer}.{row.target}",
        layer=layer,
        shape=(len(matrices), *shape) if is_stack else shape,
        only_type=row.only_type,
        matrices=matrices,
        id_limit=config.n_experts if one.codec is Codec.I64 else None,
        is_draft=is_draft,
    )


def is_stored(row: Row, specs: Mapping[str, TensorSpec], prefix: str = "") -> bool:
    """Whether the checkpoint has what ``row`` is made of under ``prefix``."""
    return prefix + row.source.format(e=0) in specs
