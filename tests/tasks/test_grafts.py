"""Tensors of a job that come from another source than the rest."""

import shutil

import pytest

from pipeline.errors import PlanError, RecipeError, SourceError
from pipeline.experts.keep_json import write_keep
from pipeline.model.layout import Layout
from pipeline.plan import Transform
from tasks.grafts import parse_grafts
from tasks.job import Job
from tasks.request import JobParameters
from tests.gguf_builder import write_hollow
from tests.pipeline.cut.models import keep_of


def plan_of(source, folder, recipe="native", **more):
    return Job(JobParameters(str(source), str(recipe), str(folder / "out"), **more)).plans[0]


@pytest.fixture(scope="module")
def files(small_miniature, tmp_path_factory):
    """The miniature by two recipes, without a weight: headers are all that planning reads."""
    folder = tmp_path_factory.mktemp("files")
    wanted = {
        "published": ("published-q3_k_m", ""),
        "native": ("native", "fork"),
        "mainline": ("native", "mainline"),
    }
    return {
        name: write_hollow(
            plan_of(small_miniature, folder, recipe, layout=layout), folder / name
        ).parent
        for name, (recipe, layout) in wanted.items()
    }


def recipe_file(folder, *grafts, extends="published-q3_k_m", more=""):
    """A recipe with ``grafts`` as lines of TOML; what is not grafted stays as it is there."""
    tables = "".join(f"\n[[graft]]\n{graft}\n" for graft in grafts)
    path = folder / "grafted.toml"
    path.write_text(f'extends = "{extends}"\n{more}{tables}')
    return path


def sources(plan):
    """Of each tensor, whether a label stands in front of what it is made of."""
    return {t.name: ":" in t.target.matrices[0].weight for t in plan.tensors}


def test_layers_go_back_to_what_another_file_has(files, tmp_path):
    more = '\n[[override]]\nroles = ["routed"]\nlayers = "0-1"\ntype = "source"\n'
    graft = 'from = "native"\nroles = ["routed"]\nlayers = "0-1"'
    recipe = recipe_file(tmp_path, graft, more=more)
    plan = plan_of(files["published"], tmp_path, recipe, graft=f"native={files['native']}")
    grafted = {name for name, is_other in sources(plan).items() if is_other}
    stacks = ("gate", "up", "down")
    assert grafted == {f"blk.{n}.ffn_{p}_exps.weight" for n in (0, 1) for p in stacks}
    assert {t.type.name for t in plan.tensors if t.name in grafted} == {"MXFP4"}
    assert {t.transform for t in plan.tensors} == {Transform.COPY}


def test_a_path_beside_the_recipe_needs_no_label(files, small_miniature, tmp_path):
    (tmp_path / "there").symlink_to(small_miniature)
    recipe = recipe_file(tmp_path, 'from = "there"\nmatch = "token_embd"')
    plan = plan_of(files["published"], tmp_path, recipe)
    grafted = [name for name, is_other in sources(plan).items() if is_other]
    assert grafted == ["token_embd.weight"]


def test_factors_that_a_mainline_file_lacks_come_from_the_checkpoint(
    files, small_miniature, tmp_path
):
    more = '\n[output]\nlayout = "fork"\n\n[draft]\nmode = "drop"\n'
    bare = recipe_file(tmp_path, extends="native", more=more)
    with pytest.raises(Exception, match="Relayout"):
        plan_of(files["mainline"], tmp_path, bare)
    graft = 'from = "original"\nsub_roles = ["engram_gate"]'
    recipe = recipe_file(tmp_path, graft, extends="native", more=more)
    plan = plan_of(files["mainline"], tmp_path, recipe, graft=f"original={small_miniature}")
    grafted = {name for name, is_other in sources(plan).items() if is_other}
    assert grafted == {f"blk.{n}.engram_{f}.weight" for n in (1, 2) for f in "qk"}
    assert plan.layout is Layout.FORK


def test_a_folder_with_the_shards_in_question_will_do(files, small_miniature, tmp_path):
    partial = tmp_path / "partial"
    shutil.copytree(small_miniature, partial)
    shards = sorted(partial.glob("*.safetensors"))
    held = {shard for shard in shards if b'"embed.weight"' in shard.read_bytes()[:200_000]}
    assert held != set(shards)
    for shard in {*shards} - held:
        shard.unlink()
    graft = f"original={partial}"
    recipe = recipe_file(tmp_path, 'from = "original"\nmatch = "^token_embd"')
    plan_of(files["published"], tmp_path, recipe, graft=graft)
    recipe = recipe_file(tmp_path, 'from = "original"\nroles = ["routed"]')
    with pytest.raises(SourceError, match=r"no such tensor.*experts"):
        plan_of(files["published"], tmp_path, recipe, graft=graft)


def test_experts_of_a_cut_file_come_from_the_uncut_one(files, small_miniature, tmp_path):
    keep = keep_of(3, n_experts=4, n_layers=6, top_k=2)
    write_keep(tmp_path / "keep.json", keep)
    asked = {"keep": str(tmp_path / "keep.json"), "layout": "fork"}
    more = '\n[draft]\nmode = "drop"\n'
    cut = write_hollow(
        plan_of(
            files["native"], tmp_path, recipe_file(tmp_path, extends="native", more=more), **asked
        ),
        tmp_path / "cut",
    )
    graft = 'from = "original"\nroles = ["routed"]'
    recipe = recipe_file(tmp_path, graft, extends="native", more=more)
    plan = plan_of(cut, tmp_path, recipe, layout="fork", graft=f"original={small_miniature}")
    stack = next(t.target for t in plan.tensors if t.name == "blk.3.ffn_up_exps.weight")
    names = [matrix.weight.split(":")[1] for matrix in stack.matrices]
    assert names == [f"layers.3.ffn.experts.{e}.w3.weight" for e in keep.layers[3]]


def test_another_model_is_refused(files, small_v4_miniature, tmp_path):
    recipe = recipe_file(tmp_path, 'from = "other"\nmatch = "^token_embd"')
    with pytest.raises(PlanError, match="grafted from another model"):
        plan_of(files["published"], tmp_path, recipe, graft=f"other={small_v4_miniature}")


FAULTS = {
    "nowhere": ('from = "original"', "", r"nothing says where that is.*--graft original=PATH"),
    "a hub": ('from = "a/b@main"', "", "Fetch it first"),
    "spare": ('from = "original"', "other=x", "takes nothing from other"),
}


@pytest.mark.parametrize(("graft", "given", "message"), FAULTS.values(), ids=FAULTS)
def test_what_is_not_there_is_named(files, tmp_path, graft, given, message):
    recipe = recipe_file(tmp_path, f'{graft}\nmatch = "^token_embd"')
    with pytest.raises(RecipeError, match=message):
        plan_of(files["published"], tmp_path, recipe, graft=given)


@pytest.mark.parametrize("text", ["original", "=path", "a=b,a=c", "a b=c"])
def test_a_label_without_a_path_is_refused(text):
    with pytest.raises(RecipeError, match="each label one path"):
        parse_grafts(text)


def test_labels_may_be_many():
    assert parse_grafts("") == {}
    assert parse_grafts("a=/x/y,b=z=1") == {"a": "/x/y", "b": "z=1"}
