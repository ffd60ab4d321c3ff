"""Tensors of a job that come from another source than the rest."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.errors import OutputError, PlanError, RecipeError, SourceError
from pipeline.experts.keep_json import write_keep
from pipeline.model.layout import Layout
from pipeline.plan import Transform
from tasks.grafts import Experts, grafts_for, parse_grafts, require_used
from tasks.job import Job
from tasks.recipe_file import read_recipe
from tasks.request import JobParameters
from tests.gguf_builder import write_hollow
from tests.pipeline.cut.models import keep_of
from tests.pipeline.released_plans import released_config


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


LISTS = {"one": ((0, 1),) * 6, "other": ((0, 2),) * 6, "three": ((0, 2, 3),) * 6}


@pytest.fixture(scope="module")
def cut_files(files, tmp_path_factory):
    """The native file, cut by several lists."""
    folder = tmp_path_factory.mktemp("cut")
    recipe = recipe_file(folder, extends="native", more='[draft]\nmode = "drop"\n')
    found = {}
    for name, layers in LISTS.items():
        whole = keep_of(len(layers[0]), n_experts=4, n_layers=6, top_k=2)
        write_keep(folder / name, replace(whole, layers=layers))
        plan = plan_of(files["native"], folder, recipe, keep=str(folder / name))
        found[name] = write_hollow(plan, folder / f"{name} file").parent
    return found


def grafted(files, source, graft, folder, selector='roles = ["routed"]'):
    recipe = recipe_file(
        folder, f'from = "x"\n{selector}', extends="native", more='[draft]\nmode = "drop"\n'
    )
    return plan_of(files[source], folder, recipe, graft=f"x={files[graft]}")


MIXED = {
    "another list": ("one", "other", r"expected 2 of 4 experts \(of layer 0 0, 1\).*0, 2\)"),
    "no list": ("native", "one", r"expected 4 of 4 experts \(all\).*2 of 4 experts"),
    "a smaller list": ("three", "other", "0, 2, 3.*0, 2"),
}


@pytest.mark.parametrize(("source", "graft", "message"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("selector", ['roles = ["routed"]', "match = 'exp_probs_b.bias$'"])
def test_experts_of_another_cut_are_refused(
    files, cut_files, tmp_path, source, graft, message, selector
):
    with pytest.raises(PlanError, match=f"(?s){message}.*Take them from"):
        grafted(files | cut_files, source, graft, tmp_path, selector)


def test_what_has_no_experts_comes_from_any_cut(files, cut_files, tmp_path):
    plan = grafted(files | cut_files, "one", "other", tmp_path, "match = '^token_embd'")
    assert [name for name, is_other in sources(plan).items() if is_other] == ["token_embd.weight"]


@pytest.mark.parametrize(
    ("graft", "places"), [("other", (0, 1)), ("three", (0, 1)), ("native", (0, 2))]
)
def test_experts_are_found_by_their_first_numbers(files, cut_files, tmp_path, graft, places):
    copy = shutil.copytree(cut_files["other"], tmp_path / "copy")
    plan = grafted(files | cut_files | {"copy": copy}, "copy", graft, tmp_path)
    stack = next(t.target for t in plan.tensors if t.name == "blk.3.ffn_up_exps.weight")
    assert tuple(e for m in stack.matrices for e in m.picks.entries) == places


def test_experts_without_common_numbers_are_refused(tmp_path):
    two = Experts(4, ((0, 1),), tmp_path / "a")
    with pytest.raises(PlanError, match=r"(?s)2 of 4 experts.*2 of 2 experts"):
        two.places_in(Experts(2, ((0, 1),), tmp_path / "b"))
    assert two.places_in(Experts(4, ((0, 1),), tmp_path / "b")) is None
    assert Experts(4, ((1, 3),), tmp_path).places_in(Experts(4, ((0, 1, 3),), tmp_path)) == (
        (1, 2),
    )


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_grafted_may_not_lie_where_the_files_go(files, tmp_path, linked):
    graft = 'from = "native"\nmatch = "^token_embd"'
    recipe = recipe_file(tmp_path, graft, more='\n[draft]\nmode = "drop"\n')
    asked = JobParameters(str(files["published"]), str(recipe), str(tmp_path / "out"))
    folder = tmp_path / "out" / "DeepSeek-V4.1-Flash-grafted-fork"
    shutil.copytree(files["native"], folder)
    if linked:
        (tmp_path / "linked").mkdir()
        for path in folder.iterdir():
            (tmp_path / "linked" / path.name).symlink_to(path)
        folder = tmp_path / "linked"
    job = Job(replace(asked, graft=f"native={folder}"))
    with pytest.raises(OutputError, match="output folder is that of a source"):
        job.plans  # noqa: B018


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


def test_of_several_recipes_each_is_given_its_own_labels():
    recipes = [read_recipe("native"), read_recipe("served-graft")]
    words = "original=/a/b"
    assert [grafts_for(recipe, words) for recipe in recipes] == ["", words]
    require_used(recipes, words)
    with pytest.raises(RecipeError, match=r"(?s)native, served-graft takes nothing from other"):
        require_used(recipes, f"{words},other=x")
    with pytest.raises(RecipeError, match="each label one path"):
        grafts_for(recipes[0], "original")


def test_a_path_in_a_parents_folder_may_be_said_anew(files, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "there").symlink_to(files["published"])
    recipe_file(tmp_path / "base", 'from = "there"\nmatch = "^token_embd"')
    child = tmp_path / "child.toml"
    child.write_text('extends = "base/grafted"\n')
    for given in ("", f"there={files['native']}"):
        plan = plan_of(files["published"], tmp_path, child, graft=given)
        (tensor,) = (t for t in plan.tensors if ":" in t.target.matrices[0].weight)
        assert tensor.name == "token_embd.weight"


def test_labels_may_be_many():
    assert parse_grafts("") == {}
    assert parse_grafts("a=/x/y,b=z=1") == {"a": "/x/y", "b": "z=1"}


def test_a_graft_that_another_stands_before_needs_no_source(files, small_miniature, tmp_path):
    """The parent's `original` is never asked for: what stands here takes all."""
    (tmp_path / "there").symlink_to(small_miniature)
    recipe = recipe_file(tmp_path, 'from = "there"\nmatch = "."', extends="served-graft")
    plan = plan_of(files["published"], tmp_path, recipe)
    assert all(sources(plan).values())


class Released:
    """As much of a source as tells how many experts it has."""

    def __init__(self, n_experts):
        self.config = replace(released_config(), n_experts=n_experts)
        self.checkpoint = SimpleNamespace(folder="somewhere")


def test_a_released_model_that_lost_experts_has_to_say_which():
    """Two that were cut by other tools to one number may have kept others."""
    assert len(Experts.of(Released(384), None).layers[0]) == 384
    with pytest.raises(PlanError, match="does not say which"):
        Experts.of(Released(256), None)
