"""P9: recipes that ask for a keep list or an importance matrix run on the miniature as well."""

import json
from pathlib import Path

import pytest

from pipeline.experts.keep_json import write_keep
from pipeline.model.targets.trunk import target_tensors
from pipeline.recipe.schema import Recipe
from tasks.model_source import ModelSource, SourceParameters
from tasks.recipe_file import read_recipe, shipped_names
from tests.conftest import SMALL
from tests.pipeline.cut.models import keep_of
from tests.pipeline.importance.writing import write_imatrix
from tests.pipeline.released_plans import released_plan
from tests.promises.whole_job import run_job

SHIPPED = {name: read_recipe(name) for name in shipped_names()}
ASK_FOR_MORE = [
    name for name, recipe in SHIPPED.items() if recipe.experts.n_keep or recipe.imatrix.required
]


def for_the_miniature(name: str, folder: Path) -> Path:
    """The recipe, made for fewer experts than the miniature has where it cuts at all."""
    path = folder / "small.toml"
    cut = "\n[experts]\nn_keep = 3\n" if SHIPPED[name].experts.n_keep else ""
    path.write_text(f'extends = "{name}"\n{cut}')
    return path


def asked_for(recipe: Recipe, source: Path, folder: Path) -> dict[str, str]:
    """What a run of it takes besides a checkpoint."""
    words = {}
    if recipe.experts.n_keep:
        keep = keep_of(3, n_experts=SMALL.n_experts, n_layers=SMALL.n_layers)
        write_keep(folder / "keep.json", keep)
        words["keep"] = str(folder / "keep.json")
    if recipe.imatrix.required:
        config = ModelSource(SourceParameters(str(source), folder)).config
        targets = target_tensors(config, recipe.output.layout)
        words["imatrix"] = str(write_imatrix(folder / "imatrix.gguf", targets))
    return words


@pytest.mark.slow
@pytest.mark.parametrize("name", ASK_FOR_MORE)
def test_p09_a_recipe_that_asks_for_more_runs_with_it_and_not_without(
    small_miniature, tmp_path, name
):
    path = for_the_miniature(name, tmp_path)
    words = asked_for(SHIPPED[name], small_miniature, tmp_path)
    for left_out in words:
        less = {word: value for word, value in words.items() if word != left_out}
        assert f"--{left_out}" in run_job(small_miniature, tmp_path / "out", path, **less).text
    outcome = run_job(small_miniature, tmp_path / "out", path, **words)
    assert outcome.ok, outcome.text
    (folder,) = (tmp_path / "out").glob("mini-small-*")
    entries = json.loads((folder / f"{folder.name}.inv.json").read_bytes())
    made = {e["name"]: (e["ty"], e["dims"][2]) for e in entries if "_exps" in e["name"]}
    plan = released_plan(name, SHIPPED[name].output.layout)
    full_size = {t.name: t.type.planner_name for t in plan.tensors}
    n_experts = 3 if "keep" in words else SMALL.n_experts
    assert made == {tensor: (full_size[tensor], n_experts) for tensor in made}
    assert len(made) == 3 * SMALL.n_layers
