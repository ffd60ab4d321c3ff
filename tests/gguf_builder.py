"""Small planned models as GGUF files with content: V4.1 in either layout, V4, and their drafts."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from pipeline.gguf.header import ALIGNMENT, TensorInfo, encode_header
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import shard_file_name, split_keys
from pipeline.model.config import CandidateConfig, DraftConfig, ModelConfig, read_config
from pipeline.model.engram.arithmetic import row_counts
from pipeline.model.layout import Layout
from pipeline.model.metadata.draft import draft_metadata
from pipeline.model.metadata.target import target_metadata
from pipeline.model.targets.draft import draft_form, draft_model, draft_tensors
from pipeline.model.targets.trunk import target_form, target_tensors
from pipeline.model.tokens.tokenizer import Tokenizer
from pipeline.plan import Plan, make_plan
from pipeline.quant.types import TYPES

VOCAB = 48
N_COMPRESSED = 40
TOKEN_MAP = np.arange(VOCAB, dtype=np.int32)[::-1] % N_COMPRESSED

DENSE, TABLE, EXPERTS, FACTORS = "Q8_0", "Q8_0", "MXFP4", "BF16"
"""Types of the small models where nothing else is said; what must be F32 is."""


@cache
def released_config(release: str = "v4.1-flash") -> ModelConfig:
    path = Path(__file__).parent / f"data/deepseek-{release}.config.json"
    return read_config(json.loads(path.read_bytes()))


@cache
def small_config(table_width: int = 32, first_prime: int = 30) -> ModelConfig:
    """Six layers: two with a window only, two at ratio 2, two at ratio 1; engram at 1 and 3."""
    released = released_config()
    assert released.engram
    engram = replace(
        released.engram,
        layers=(1, 3),
        max_ngram=3,
        vocab_size=first_prime,
        n_heads=2,
        head_dim=table_width,
        n_compressed=N_COMPRESSED,
    )
    return replace(
        released,
        vocab_size=VOCAB,
        hidden=64,
        expert_ff=32,
        n_layers=6,
        n_heads=2,
        head_dim=32,
        rope_dim=16,
        q_lora=32,
        o_lora=32,
        o_groups=1,
        n_experts=4,
        n_experts_used=2,
        compress_ratios=(0, 0, 2, 2, 1, 1, 0, 0, 0),
        kv_sources=(2, 4),
        index_sources=(2, 4, 5),
        candidate=CandidateConfig(source_layer=4, block_size=2, top_k=3),
        index_heads=2,
        index_dim=32,
        index_top_k=4,
        engram=replace(engram, n_rows=row_counts(engram)),
        draft=_small_draft(released, target_layers=(3, 4, 5)),
        vision=None,
    )


def _small_draft(released: ModelConfig, target_layers: tuple[int, ...]) -> DraftConfig:
    return replace(
        released.draft,
        target_layers=target_layers,
        mask_token=VOCAB - 1,
        n_experts=3,
        n_experts_used=2,
        markov_rank=32,
    )


@cache
def small_v4_config() -> ModelConfig:
    """Six layers: one of each kind, hash-routed and not."""
    released = released_config("v4-flash-0731")
    return replace(
        released,
        vocab_size=VOCAB,
        hidden=64,
        expert_ff=32,
        n_layers=6,
        n_heads=2,
        head_dim=32,
        rope_dim=16,
        q_lora=32,
        o_lora=32,
        o_groups=1,
        n_experts=4,
        n_experts_used=2,
        n_hash_layers=2,
        compress_ratios=(0, 4, 128, 4, 0, 4, 0, 0, 0),
        index_heads=2,
        index_dim=64,
        index_top_k=4,
        draft=_small_draft(released, target_layers=(3, 4, 5)),
    )


def small_tokenizer(config: ModelConfig) -> Tokenizer:
    return Tokenizer(
        tokens=tuple(f"t{n}" for n in range(config.vocab_size)),
        token_types=(1,) * config.vocab_size,
        merges=("t 1",),
        bos=config.bos_token,
        eos=config.eos_token,
        pad=2,
        add_bos=True,
        add_eos=False,
        pre="deepseek-v3",
        sha256="",
    )


def small_keys(config: ModelConfig, layout: Layout) -> tuple[KeyValue, ...]:
    return target_metadata(
        config,
        small_tokenizer(config),
        TOKEN_MAP,
        form=target_form(config, layout),
        file_type=7,
        name="small",
    )


def small_plan(
    layout: Layout,
    config: ModelConfig | None = None,
    *,
    factors: str = FACTORS,
    table: str = TABLE,
    types: Mapping[str, str] | None = None,
    shard_nbytes: int = 30_000,
) -> Plan:
    """The small model in the fixed shard positions, experts over several shards.

    ``types`` gives some tensors, by name, another type than the usual one.
    """
    config = config or small_config()
    targets = target_tensors(config, layout)
    usual = {t.name: _type(t, factors, table) for t in targets}
    return make_plan(
        name="small",
        form=target_form(config, layout),
        config=config,
        targets=targets,
        types={name: TYPES[named] for name, named in {**usual, **(types or {})}.items()},
        key_values=small_keys(config, layout),
        shard_nbytes=shard_nbytes,
    )


@cache
def full_config(release: str = "v4.1-flash") -> ModelConfig:
    """A released model but for its vocabulary."""
    config = released_config(release)
    return replace(
        config,
        vocab_size=VOCAB,
        engram=replace(config.engram, n_compressed=N_COMPRESSED) if config.engram else None,
        draft=replace(config.draft, mask_token=VOCAB - 1),
    )


def full_plan(
    layout: Layout, *, release: str = "v4.1-flash", dense: str = "Q8_0", table: str = "Q3_K"
) -> Plan:
    """The target of a released model at full size but for its vocabulary."""
    config = full_config(release)
    targets = target_tensors(config, layout)
    types = {t.name: t.only_type or (table if t.is_table else dense) for t in targets}
    return make_plan(
        name="full",
        form=target_form(config, layout),
        config=config,
        targets=targets,
        types={name: TYPES[type_name] for name, type_name in types.items()},
        key_values=small_keys(config, layout),
        shard_nbytes=10**11,
    )


def draft_plan(
    config: ModelConfig, name: str = "small-draft", *, without: Collection[str] = ()
) -> Plan:
    """The draft of ``config``, in one file, but for some keys."""
    targets = draft_tensors(config)
    keys = draft_metadata(config, small_tokenizer(config), file_type=7, name=name)
    return make_plan(
        name=name,
        form=draft_form(config),
        config=draft_model(config),
        targets=targets,
        types={t.name: TYPES[t.only_type or DENSE] for t in targets},
        key_values=[entry for entry in keys if entry.key not in without],
        shard_nbytes=10**11,
    )


def write_hollow(plan: Plan, folder: Path) -> Path:
    """The files of ``plan`` at full length with headers and no content; returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in plan.shards:
        with (folder / shard.file_name).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)
    return folder / plan.shards[0].file_name


def _type(target, factors: str, table: str) -> str:
    if target.only_type:
        return target.only_type
    if target.name.endswith(("engram_q.weight", "engram_k.weight")):
        return factors
    if target.is_table:
        return table
    return EXPERTS if "_exps" in target.name else DENSE


def content_of(name: str, type_name: str, nbytes: int) -> bytes:
    """Bytes that depend on the name alone; numbers where the type stores plain numbers."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if type_name in ("F32", "BF16"):
        values = random.standard_normal(nbytes // TYPES[type_name].block_nbytes, np.float32)
        return values.tobytes() if type_name == "F32" else bf16(values)
    return random.bytes(nbytes)


def bf16(values) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def plan_contents(plan: Plan) -> dict[str, bytes]:
    return {t.name: content_of(t.name, t.type.name, t.nbytes) for t in plan.tensors}


def write_plan(plan: Plan, folder: Path, contents: dict[str, bytes] | None = None) -> Path:
    """The files of ``plan``; returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = contents or plan_contents(plan)
    for shard in plan.shards:
        whole = bytearray(shard.nbytes)
        whole[: len(shard.header)] = shard.header
        for tensor in shard.tensors:
            assert len(contents[tensor.name]) == tensor.nbytes, tensor.name
            whole[tensor.offset : tensor.offset + tensor.nbytes] = contents[tensor.name]
        (folder / shard.file_name).write_bytes(whole)
    return folder / plan.shards[0].file_name


def write_set(path: Path, key_values, groups, contents) -> Path:
    """A model made by others: ``groups`` of (name, ne, type name), one a shard, no filler key.

    One group makes a single file at ``path``; more make a set named after it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    n_tensors = sum(map(len, groups))
    paths = []
    for no, group in enumerate(groups):
        is_split = len(groups) > 1
        split = split_keys(no, len(groups), n_tensors) if is_split else ()
        name = shard_file_name(path.stem, no, len(groups)) if is_split else path.name
        keys = (*(key_values if no == 0 else ()), *split)
        paths.append(path.with_name(name))
        paths[-1].write_bytes(file_bytes(keys, group, contents))
    return paths[0]


def file_bytes(key_values, tensors, contents) -> bytes:
    infos, blob = [], b""
    for name, ne, type_name in tensors:
        ggml_type = TYPES[type_name]
        assert len(contents[name]) == ggml_type.row_nbytes(ne[0]) * math.prod(ne[1:]), name
        infos.append(TensorInfo(name, ne, ggml_type.type_id, len(blob)))
        blob += contents[name] + bytes(-len(contents[name]) % ALIGNMENT)
    return encode_header(key_values, infos) + blob


def plan_tensors(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    """(name, ne, type name) of every tensor of a plan, in its order."""
    return [(t.name, t.target.shape[::-1], t.type.name) for t in plan.tensors]
