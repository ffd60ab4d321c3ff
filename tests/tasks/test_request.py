"""What follows from a request before anything is read but headers."""

from dataclasses import replace

import pytest

from pipeline.errors import PlanError, RecipeError
from pipeline.experts.keep_json import write_keep
from pipeline.model.layout import Layout
from tasks.gguf_source import is_gguf
from tasks.job import Job
from tasks.recipe_model import targets_of
from tasks.request import JobParameters, one_of_several
from tests.gguf_builder import write_hollow
from tests.pipeline.cut.models import keep_of


def job(source, folder, recipe="native", **more):
    return Job(JobParameters(str(source), str(recipe), str(folder / "out"), **more))


@pytest.fixture(scope="module")
def made(small_miniature, tmp_path_factory):
    """Headers of the native files in both layouts, and of the draft."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    for layout in Layout:
        target, draft = job(small_miniature, folder, layout=layout).plans
        found[layout] = write_hollow(target, folder / layout).parent
        found["draft"] = write_hollow(draft, folder / "draft")
    return found


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("recipe", ["as-is", "lowbit-q2_k"])
def test_without_a_word_the_layout_is_that_of_the_source(made, tmp_path, layout, recipe):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "{recipe}"\n[draft]\nmode = "drop"\n')
    asked = job(made[layout], tmp_path, path)
    assert asked.name.endswith(f"-mine-{layout}")
    assert asked.plans[0].layout is layout
    assert {t.name for t in targets_of(str(made[layout]), asked.recipe)} == {
        t.name for t in asked.plans[0].tensors
    }


def test_a_word_on_the_layout_counts(made, small_miniature, tmp_path):
    assert job(small_miniature, tmp_path).layout is Layout.MAINLINE
    assert job(made["fork"], tmp_path, "as-is", layout="mainline").layout is Layout.MAINLINE
    assert job(made["fork"], tmp_path, "bpw-3.0-mainline").layout is Layout.MAINLINE
    assert job(made["mainline"], tmp_path, "bpw-3.0").layout is Layout.FORK


def test_a_draft_alone_is_no_target(made, tmp_path):
    with pytest.raises(PlanError, match="draft alone, and the recipe makes a target"):
        job(made["draft"], tmp_path, "as-is").name  # noqa: B018


def test_a_suffix_may_be_in_capitals(made, tmp_path):
    (tmp_path / "DRAFT.GGUF").symlink_to(made["draft"])
    assert is_gguf(tmp_path / "DRAFT.GGUF")
    (plan,) = job(tmp_path / "DRAFT.GGUF", tmp_path, "draft").plans
    assert plan.form.is_draft


def test_nothing_is_cut_from_a_draft(small_miniature, tmp_path):
    write_keep(tmp_path / "keep.json", keep_of(3, n_experts=4, n_layers=6, top_k=2))
    asked = job(small_miniature, tmp_path, "draft", keep=str(tmp_path / "keep.json"))
    assert asked.name == job(small_miniature, tmp_path, "draft").name
    with pytest.raises(RecipeError, match=r"makes a draft alone.*found --keep.*Leave"):
        asked.plans  # noqa: B018
    asked = job(small_miniature, tmp_path, "draft", imatrix="m.gguf")
    with pytest.raises(RecipeError, match="found --imatrix"):
        asked.plans  # noqa: B018


def test_of_what_is_said_for_several_recipes_each_hears_its_own():
    said = JobParameters("s", "native", "out", keep="k", imatrix="m", graft="original=x")
    target, draft, grafted = (
        one_of_several(replace(said, recipe=name)) for name in ("native", "draft", "served-graft")
    )
    assert target == replace(said, graft="")
    assert draft == JobParameters("s", "draft", "out")
    assert grafted == replace(said, recipe="served-graft")


def test_the_source_of_a_recipe_lies_beside_it(small_miniature, tmp_path):
    (tmp_path / "there").symlink_to(small_miniature)
    path = tmp_path / "mine.toml"
    path.write_text('extends = "native"\n[source]\npath = "there"\n')
    asked = job("", tmp_path, path)
    assert asked.source.checkpoint.folder.samefile(small_miniature)
