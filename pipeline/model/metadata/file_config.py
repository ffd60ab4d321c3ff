"""A model's description from a finished file, made by this project or not.

What `pipeline.model.config` reads from config.json, read from the metadata that was made of it.
"""

from __future__ import annotations

import numpy as np

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import GgufModel
from pipeline.model.config import DraftConfig, EngramConfig, ModelConfig, RopeScaling
from pipeline.model.contract.sizes import read_sizes
from pipeline.model.engram.arithmetic import prime_start
from pipeline.model.form import Form
from pipeline.model.layout import Layout
from pipeline.model.metadata.draft import CAPTURED_LAYER_SHIFT
from pipeline.model.metadata.file_facts import find_candidate, read_hash_facts, source_layers
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.model.metadata.trunk import GATING_FUNCS

NO_DRAFT = DraftConfig(
    n_stages=0,
    n_experts=0,
    n_experts_used=0,
    block_size=0,
    mask_token=0,
    target_layers=(),
    markov_rank=0,
)
"""In the description of a target alone, whose file says nothing of a draft."""

UNSCALED = (1, 1)
"""No file tells which rectangles of the checkpoint shared a scale."""

_SCORING = {number: name for name, number in GATING_FUNCS.items()}


def config_of(
    model: GgufModel, form: Form, draft: tuple[GgufModel, Form] | None = None
) -> ModelConfig:
    """The description of ``model``, which fulfils the loader contract of ``form``.

    Vision is in no file. Floats are the shortest that their 32 bits stand for.

    Args:
        model: Headers of all files of a target or a draft.
        form: Its form.
        draft: The draft beside a target, and its form.

    Raises:
        FormatError: A value is missing, of another kind, or one that no description can express.
    """
    keys, sizes = _Keys(model, form), read_sizes(model, form)
    described = NO_DRAFT
    if form.is_draft:
        described = _draft(model, form)
    elif draft is not None:
        described = _draft(*draft)
    has_sources = form.layout is not None
    kv_sources, index_sources = source_layers(model) if has_sources else ((), ())
    n_stages = 0 if form.is_draft else described.n_stages
    ratios = sizes.ratios[: sizes.n_layers] or (0,) * sizes.n_layers
    return ModelConfig(
        family=form.family,
        vocab_size=sizes.n_vocab,
        hidden=sizes.hidden,
        expert_ff=sizes.expert_ff,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        n_kv_heads=keys.number("attention.head_count_kv"),
        head_dim=sizes.head_dim,
        rope_dim=keys.number("rope.dimension_count"),
        q_lora=sizes.q_lora,
        o_lora=sizes.o_lora,
        o_groups=sizes.o_groups,
        n_experts=sizes.n_experts,
        n_shared_experts=sizes.n_shared,
        n_experts_used=sizes.n_used,
        n_hash_layers=sizes.n_hash_layers,
        scoring_func=_scoring(keys),
        norm_weights=keys.find("expert_weights_norm") is True,
        weights_scale=keys.decimal("expert_weights_scale"),
        swiglu_limit=_limit(keys),
        rms_eps=keys.decimal("attention.layer_norm_rms_epsilon"),
        sliding_window=keys.number("attention.sliding_window"),
        context=keys.number("context_length"),
        rope_theta=keys.spare_decimal("rope.freq_base"),
        compress_rope_theta=keys.spare_decimal("attention.compress_rope_freq_base"),
        rope_scaling=_rope_scaling(keys),
        compress_ratios=(*ratios, *(0,) * n_stages),
        kv_sources=kv_sources,
        index_sources=index_sources,
        index_heads=keys.spare_number("attention.indexer.head_count"),
        index_dim=keys.spare_number("attention.indexer.key_length"),
        index_top_k=keys.spare_number("attention.indexer.top_k"),
        candidate=find_candidate(model) if has_sources else None,
        hc_mult=sizes.n_streams,
        hc_iterations=keys.number("hyper_connection.sinkhorn_iterations"),
        hc_eps=keys.decimal("hyper_connection.epsilon"),
        bos_token=_token(model.key_values.get("tokenizer.ggml.bos_token_id")),
        eos_token=_token(model.key_values.get("tokenizer.ggml.eos_token_id")),
        scale_block=UNSCALED,
        engram=_engram(model, keys, form.layout) if form.layout else None,
        draft=described,
        vision=None,
    )


class _Keys(HeaderKeys):
    """Numbers that are no integers, too, and what drafts may do without: nothing is then 0."""

    def __init__(self, model: GgufModel, form: Form) -> None:
        super().__init__(model.key_values, form.architecture)
        self._may_lack = form.is_draft

    def decimal(self, name: str) -> float:
        """The shortest number that gives the same 32-bit float."""
        value = self.find(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise FormatError("the file lacks a key", expected=f"a number under {self.full(name)}")
        return float(str(np.float32(value)))

    def spare_decimal(self, name: str) -> float:
        """`decimal`, but of drafts that do not say it 0."""
        return 0.0 if self._may_lack and self.find(name) is None else self.decimal(name)

    def spare_number(self, name: str) -> int:
        """`number`, but of drafts that do not say it 0."""
        return 0 if self._may_lack and self.find(name) is None else self.number(name)


def _scoring(keys: HeaderKeys) -> str:
    number = keys.number("expert_gating_func")
    if number not in _SCORING:
        raise FormatError(
            f"{keys.full('expert_gating_func')} is no scoring of these models",
            expected=" or ".join(f"{n} ({name})" for n, name in _SCORING.items()),
            found=number,
        )
    return _SCORING[number]


def _limit(keys: _Keys) -> float:
    """The clamp of all layers, which the file may say once or for each."""
    name = "swiglu_clamp_exp"
    values = keys.find(name)
    if not isinstance(values, tuple):
        return keys.decimal(name)
    limits = {float(str(np.float32(value))) for value in values}
    if len(limits) != 1:
        raise FormatError(
            f"{keys.full(name)} differs between layers",
            expected="one limit for all",
            found=", ".join(map(str, sorted(limits))),
        )
    return limits.pop()


def _rope_scaling(keys: _Keys) -> RopeScaling:
    return RopeScaling(
        kind=str(keys.find("rope.scaling.type") or ""),
        factor=keys.spare_decimal("rope.scaling.factor"),
        beta_fast=keys.spare_decimal("rope.scaling.yarn_beta_fast"),
        beta_slow=keys.spare_decimal("rope.scaling.yarn_beta_slow"),
        original_context=keys.spare_number("rope.scaling.original_context_length"),
    )


def _token(entry: KeyValue | None) -> int:
    if entry is None or not isinstance(entry.value, int):
        raise FormatError("the file does not say its special tokens")
    return entry.value


def _engram(model: GgufModel, keys: HeaderKeys, layout: Layout) -> EngramConfig:
    facts, said = read_hash_facts(model, layout), keys.find_number("engram.vocab_size")
    buckets = [size for sizes in facts.sizes for size in sizes]
    return EngramConfig(
        layers=facts.layers,
        n_rows=facts.n_rows,
        max_ngram=facts.max_ngram,
        vocab_size=said or prime_start(buckets) or min(buckets),
        n_heads=facts.n_heads,
        head_dim=facts.width,
        pad_token=facts.pad_token,
        n_compressed=max(facts.token_map) + 1,
    )


def _draft(draft: GgufModel, form: Form) -> DraftConfig:
    keys, sizes = _Keys(draft, form), read_sizes(draft, form)
    assert sizes.draft is not None
    shift = CAPTURED_LAYER_SHIFT[form.family]
    return DraftConfig(
        n_stages=sizes.n_layers,
        n_experts=sizes.n_experts,
        n_experts_used=sizes.n_used,
        block_size=keys.number("block_size"),
        mask_token=_token(draft.key_values.get("tokenizer.ggml.mask_token_id")),
        target_layers=tuple(layer - shift for layer in keys.numbers("target_layers")),
        markov_rank=sizes.draft.markov_rank,
    )
