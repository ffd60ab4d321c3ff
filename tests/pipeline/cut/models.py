"""Small finished models, keep lists for them, and cuts made as the tasks make them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from gguf import GGUFReader

from pipeline.experts.choice import Choice
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import write_keep
from pipeline.experts.origin import Origin
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.layout import Layout
from pipeline.plan import Plan
from tasks.cut.experts import CutShard
from tasks.cut.job import CutJob, CutParameters
from tasks.cut.variant import Variant
from tasks.naming import name_shards
from tests.gguf_builder import (
    draft_plan,
    plan_contents,
    plan_tensors,
    small_config,
    small_keys,
    small_plan,
    write_plan,
    write_set,
)

N_LAYERS, N_EXPERTS, TOP_K = 6, 7, 2
CONFIG = replace(small_config(), n_experts=N_EXPERTS)

STACKS = [f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
PER_EXPERT = {
    f"blk.{layer}.{name}"
    for layer in range(N_LAYERS)
    for name in (*STACKS, "ffn_gate_inp.weight", "exp_probs_b.bias", "exp_probs_b_vl.bias")
}
"""Every tensor of the model that has an entry per expert, stated here again."""


def keep_of(
    n_kept: int,
    *,
    seed: int = 0,
    n_experts: int = N_EXPERTS,
    n_layers: int = N_LAYERS,
    top_k: int = TOP_K,
) -> KeepList:
    """Other experts in every layer."""
    rng = random.Random(f"{seed} {n_kept}")
    layers = [sorted(rng.sample(range(n_experts), n_kept)) for _ in range(n_layers)]
    origin = Origin(f"{seed:064x}", "saliency.pt")
    choice = Choice("test", Honesty.TRUE_GATE, Criterion.REAP, n_experts, n_kept, (origin,))
    return KeepList(n_experts, top_k, tuple(map(tuple, layers)), (choice,))


def plan_of(layout: Layout, *, shard_nbytes: int = 60_000) -> Plan:
    return small_plan(layout, CONFIG, shard_nbytes=shard_nbytes)


def shards(folder: Path, layout: Layout, *, with_draft: bool = False) -> Path:
    """A model in the shards that this project makes, perhaps with a draft beside it."""
    first = write_plan(plan_of(layout), folder)
    if with_draft:
        write_plan(draft_plan(CONFIG), folder)
    return first


def single(folder: Path, layout: Layout) -> Path:
    """The same model in one file, without split keys and filler, as others write it."""
    plan = plan_of(layout)
    keys = small_keys(CONFIG, layout)
    return write_set(folder / "small.gguf", keys, [plan_tensors(plan)], plan_contents(plan))


def bare_first(folder: Path, layout: Layout) -> Path:
    """The same model in a set whose first file holds nothing but metadata."""
    plan = plan_of(layout)
    tensors = plan_tensors(plan)
    groups = [[], tensors[:40], tensors[40:90], tensors[90:]]
    return write_set(folder / "small.gguf", small_keys(CONFIG, layout), groups, plan_contents(plan))


MASTERS = {"shards": shards, "single": single, "bare first": bare_first}


def cut(path: Path, out: Path, *keeps: KeepList) -> list[Variant]:
    """Cut the model at ``path`` by each of ``keeps``, up to the names of the files."""
    job = begun(path, out, *keeps)
    for no in range(len(job.whole.shards)):
        shard_task(job, no).run()
    for variant in job.variants:
        paths = map(job.store.path, variant.shard_specs)
        named = zip(variant.shards, paths, strict=True)
        name_shards(variant.folder, {shard.file_name: path for shard, path in named})
    return list(job.variants)


def begun(path: Path, out: Path, *keeps: KeepList) -> CutJob:
    """The job of a cut, its lists on disk."""
    lists = [out / f"keep-{no}.json" for no in range(len(keeps))]
    for name, keep in zip(lists, keeps, strict=True):
        write_keep(name, keep)
    return CutJob(CutParameters(str(path), ",".join(map(str, lists)), str(out)))


def shard_task(job: CutJob, no: int) -> CutShard:
    parameters = job.parameters
    return CutShard(
        no=no,
        spec=job.shard_spec(no),
        path=parameters.path,
        keep=parameters.keep,
        out=parameters.out,
        threads=2,
    )


def first_file(variant: Variant) -> Path:
    return variant.folder / variant.shards[0].file_name


def cut_model(path: Path, out: Path, keep: KeepList) -> GgufModel:
    """The headers of the model at ``path``, cut by ``keep``."""
    return read_model(first_file(cut(path, out, keep)[0]))


def arrays(model: GgufModel) -> dict[str, object]:
    """Every tensor as gguf-py reads it, expert by expert along the first axis."""
    return {
        tensor.name: tensor.data for file in model.files for tensor in GGUFReader(file.path).tensors
    }


def write_lists(path: Path, lists) -> Path:
    path.write_text(json.dumps({"layers": {str(n): ids for n, ids in enumerate(lists)}}))
    return path
