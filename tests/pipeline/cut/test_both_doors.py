"""Cutting and converting commute: experts left out on the way, or cut from what was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.experts.keep_json import write_keep
from pipeline.files import read_bytes
from pipeline.gguf.model_file import read_model
from pipeline.gguf.reader import GgufFile, read_gguf
from pipeline.model.layout import Layout
from pipeline.recipe.schema import load_recipe
from tasks.job import Job
from tasks.naming import name_shards
from tasks.request import JobParameters
from tests.conftest import SMALL
from tests.pipeline.cut.models import cut, first_file, keep_of
from tests.pipeline.filling import fill, shard_path

RECIPES = Path(__file__).parents[3] / "recipes"
FAST = ("native", Layout.MAINLINE)
FOR_IK = ("bpw-2.4", "bpw-3.0")
"""With types that only go with the fork layout."""
KEEP = keep_of(3, n_experts=SMALL.n_experts, n_layers=SMALL.n_layers)


def shipped() -> list[str]:
    """The recipes for a whole V4.1 model that ask for a checkpoint and no more."""
    found = {path.stem: load_recipe(path) for path in RECIPES.glob("*.toml")}
    return sorted(
        name
        for name, recipe in found.items()
        if recipe.roles
        and recipe.roles.engram
        and recipe.roles.engram != "source"
        and not (recipe.experts.n_keep or recipe.graft or recipe.imatrix.required)
    )


def converted(source, out, recipe, layout, keep="") -> Path:
    """The first file of a model made by ``recipe``."""
    parameters = JobParameters(str(source), recipe, str(out), layout, "mini", keep=str(keep))
    job = Job(parameters)
    for no in range(len(job.shards)):
        fill(job, no)
    paths = {shard.file_name: shard_path(job, no) for no, shard in enumerate(job.shards)}
    name_shards(job.folder, paths)
    return job.folder / job.shards[0].file_name


def assert_same(one: Path, other: Path) -> None:
    """Each file of one, draft and all, holds what the other's holds.

    To the last byte, unless a stack is a whole number of pages in one only and so has its place
    elsewhere: a conversion sorts by that, a cut keeps the order.
    """
    pairs = [sorted(path.parent.glob("*.gguf")) for path in (one, other)]
    for ours, theirs in zip(*pairs, strict=True):
        first, second = read_gguf(ours), read_gguf(theirs)
        if list(first.tensors) == list(second.tensors):
            assert ours.read_bytes() == theirs.read_bytes(), (ours.name, theirs.name)
        assert tensors_of(first) == tensors_of(second)


def tensors_of(file: GgufFile) -> dict[str, tuple[object, ...]]:
    return {
        t.name: (t.ne, t.type, read_bytes(file.path, t.offset, t.nbytes))
        for t in file.tensors.values()
    }


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=() if (recipe, layout) == FAST else pytest.mark.slow)
        for recipe in shipped()
        for layout in Layout
        if layout is Layout.FORK or recipe not in FOR_IK
    ],
)
def test_both_give_the_same_files(small_miniature, tmp_path, recipe, layout):
    write_keep(tmp_path / "keep.json", KEEP)
    whole = converted(small_miniature, tmp_path / "whole", recipe, layout)
    variant = cut(whole, tmp_path / "cut", KEEP)[0]
    left = converted(small_miniature, tmp_path / "left", recipe, layout, tmp_path / "keep.json")
    assert_same(first_file(variant), left)
    assert read_model(left).key_values["deepseek41.expert_count"].value == 3
