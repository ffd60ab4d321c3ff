"""Small models that nothing is wrong with, and what breaks them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from pipeline.diagnosis.diagnose import Diagnosis, examine
from pipeline.diagnosis.opened import Opened
from pipeline.gguf.header import encode_header
from pipeline.gguf.keys import KeyValue, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufFile, GgufTensor, read_header
from pipeline.model.config import ModelConfig
from pipeline.model.engram.arithmetic import row_counts
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import UNION_KEYS
from pipeline.plan import Plan
from pipeline.quant.types import TYPES
from tests.gguf_builder import plan_tensors, small_config, small_keys, small_plan, write_set
from tests.gguf_forms import tensor, with_tensors

P = "deepseek41."
FIVE = tuple(f"{P}engram.{n}" for n in ("multipliers", "primes", "offsets", "token_map", "pad_id"))
LATER = [k for k in UNION_KEYS if k.startswith(f"{P}engram")]
"""Engram keys that published files lack, and those that only some engines read."""

DELICATE = {"hc_attn_fn": "F32", "hc_ffn_fn": "F32", "ffn_gate_inp": "BF16"}


@cache
def sound_plan(layout: Layout, config: ModelConfig | None = None) -> Plan:
    """The small model as this project makes it: small tensors whole, experts in MXFP4."""
    names = [tensor.name for tensor in small_plan(layout, config).tensors]
    types = {n: kind for n in names for part, kind in DELICATE.items() if f".{part}." in n}
    return small_plan(layout, config, factors="F32", types=types)


def released_lookups() -> ModelConfig:
    """The small configuration with n-grams and heads as released, which files need not state."""
    config = small_config()
    engram = replace(config.engram, max_ngram=4, n_heads=8)
    return replace(config, engram=replace(engram, n_rows=row_counts(engram)))


def sound_model(layout: Layout, config: ModelConfig | None = None) -> GgufModel:
    """Its headers, as those of one file that is nowhere."""
    plan = sound_plan(layout, config)
    tensors = {
        t.name: GgufTensor(t.name, t.target.shape[::-1], t.type, t.offset, t.nbytes)
        for t in plan.tensors
    }
    keys = {entry.key: entry for entry in small_keys(plan.config, layout)}
    return GgufModel((GgufFile(Path("model.gguf"), 0, 3, keys, tensors, 0, 32),))


def written(
    path: Path,
    layout: Layout = Layout.FORK,
    *,
    keys: list[KeyValue] | None = None,
    n_files: int = 1,
) -> Path:
    """The sound model, all zeros, as others would write it, in ``n_files`` files."""
    plan = sound_plan(layout)
    keys = list(small_keys(plan.config, layout)) if keys is None else keys
    tensors = plan_tensors(plan)
    step = -(-len(tensors) // n_files)
    groups = [tensors[at : at + step] for at in range(0, len(tensors), step)]
    zeros = {tensor.name: bytes(tensor.nbytes) for tensor in plan.tensors}
    return write_set(path, keys, groups, zeros)


def examined(model: GgufModel) -> Diagnosis:
    return examine(model.files[0].path, Opened(model))


def aligned(model: GgufModel, alignment: int) -> GgufModel:
    return GgufModel((replace(model.files[0], alignment=alignment),))


def texts(diagnosis: Diagnosis) -> list[str]:
    return [finding.what for finding in diagnosis.findings]


def commands_of(diagnosis: Diagnosis) -> list[str]:
    return [c for finding in diagnosis.findings if finding.mend for c in finding.mend.commands]


def retyped(part, type_name):
    def change(model):
        names = [n for n in model.tensors if part in n]
        changed = [tensor(model, n, type=TYPES[type_name]) for n in names]
        assert changed
        return with_tensors(model, *changed)

    return change


def with_alignment_key(path: Path, alignment: int = 4096) -> None:
    """Write the key into a file's header; the data behind it stay padded to 32."""
    header = read_header(path)
    stand_in = u32("general.alignmenX", alignment)
    data = path.read_bytes()[header.data_offset :]
    head = encode_header([*header.key_values.values(), stand_in], list(header.infos))
    path.write_bytes(head.replace(b"general.alignmenX", b"general.alignment") + data)
