"""The tensors of a draft file: the three MTP/DSpark stages, as llama.cpp's `dflash` reads them.

The draft has no embedding and no head of its own; engines lend it the target's. V4.1's bias for
image tokens stays out: no `dflash` loader knows it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pipeline.model.config import DRAFT_PREFIX, ModelConfig
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.form import V4_DRAFT, V41_DRAFT, Form
from pipeline.model.targets.rows import (
    BLOCK_ROWS,
    F32,
    STREAM_HEAD_ROWS,
    Row,
    is_stored,
    tensor_of,
)
from pipeline.model.targets.tensor import TargetTensor

_LEFT_OUT = frozenset({"exp_probs_b_vl.bias"})

_FIRST_STAGE_ROWS = (
    Row("fc.weight", "main_proj.weight"),
    Row("enc.output_norm.weight", "main_norm.weight", F32),
)

_LAST_STAGE_ROWS = (
    Row("output_norm.weight", "norm.weight", F32),
    *STREAM_HEAD_ROWS,
    # V4.1's names of the Markov pair, then V4's.
    Row("markov_w1.weight", "markov_head.embed.weight"),
    Row("markov_w2.weight", "markov_head.head.weight"),
    Row("markov_w1.weight", "markov_head.markov_w1.weight"),
    Row("markov_w2.weight", "markov_head.markov_w2.weight"),
    Row("conf_proj.weight", "confidence_head.proj.weight"),
)


def draft_form(config: ModelConfig) -> Form:
    """The form of ``config``'s draft file."""
    return V41_DRAFT if config.family == "v4.1" else V4_DRAFT


def draft_model(config: ModelConfig) -> ModelConfig:
    """The draft as a model of its own: its stages are the layers, its experts the experts.

    A stage sees a sliding window only, hashes nothing and looks up no engram.
    """
    draft = config.draft
    return replace(
        config,
        n_layers=draft.n_stages,
        n_experts=draft.n_experts,
        n_experts_used=draft.n_experts_used,
        n_hash_layers=0,
        compress_ratios=(0,) * draft.n_stages,
        kv_sources=(),
        index_sources=(),
        candidate=None,
        engram=None,
        vision=None,
    )


@lru_cache(maxsize=4)
def draft_tensors(config: ModelConfig) -> tuple[TargetTensor, ...]:
    """Every tensor of the draft file: what all stages share, then stage by stage.

    V4.1-Flash gives 78, V4-Flash-0731 81.
    """
    specs = {spec.name: spec for spec in expected_tensors(config)}
    model = draft_model(config)
    stages = [f"{DRAFT_PREFIX}{stage}." for stage in range(model.n_layers)]
    shared = [
        tensor_of(row, specs, model, prefix=prefix, is_draft=True)
        for rows, prefix in ((_FIRST_STAGE_ROWS, stages[0]), (_LAST_STAGE_ROWS, stages[-1]))
        for row in rows
        if is_stored(row, specs, prefix)
    ]
    blocks = [
        tensor_of(row, specs, model, prefix=prefix, layer=stage, is_draft=True)
        for stage, prefix in enumerate(stages)
        for row in BLOCK_ROWS
        if row.target not in _LEFT_OUT and is_stored(row, specs, prefix)
    ]
    return (*shared, *blocks)
