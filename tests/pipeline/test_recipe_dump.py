"""Recipes written as TOML, and recipes told from files."""

from __future__ import annotations

import time
import tomllib
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import FormatError
from pipeline.gguf.keys import text
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.contract.form import form_of
from pipeline.model.layout import Layout
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.quant.types import TYPES
from pipeline.recipe.choose import choose
from pipeline.recipe.derive import derive_draft, derive_recipe
from pipeline.recipe.dump import recipe_line, recipe_toml
from pipeline.recipe.from_file import RECIPE_KEY, recipe_of_file
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, load_recipe, parse_recipe
from tests.gguf_builder import (
    draft_plan,
    small_config,
    small_plan,
    small_v4_config,
    write_hollow,
)
from tests.gguf_forms import extra, tensor, with_keys, with_tensors
from tests.pipeline.released_plans import ROOT, config_for

SHIPPED = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
OF_A_CHECKPOINT = [name for name in SHIPPED if name not in ("draft", "as-is")]


@cache
def shipped(name: str) -> Recipe:
    return load_recipe(ROOT / f"recipes/{name}.toml")


def parse(content: str) -> Recipe:
    return parse_recipe(content.encode(), Path("other.toml"))


def targets_of(name: str, layout: Layout | None = None) -> tuple[TargetTensor, ...]:
    return target_tensors(config_for(name), layout or shipped(name).output.layout)


EVERYTHING = r"""
name = "all-of-it"
description = '''Quotes ", backslashes \, apostrophes ', Umlaute ÄÖ, and so on.'''
allow = ["below_bf16"]
[roles]
routed = "source"
engram = "Q8_0"
attention = "IQ4_KS"
embedding = "BF16"
shared = "Q8_0"
[sub_roles]
router = "F32"
[[override]]
match = '^blk\.[01]\.'
type = "Q5_K"
[[override]]
roles = ["routed"]
sub_roles = ["routed_up"]
layers = "0-1,5,30-"
optional = true
type = "source"
[[graft]]
from = "elsewhere/original"
roles = ["attention"]
[imatrix]
file = "elsewhere/m.gguf"
prior = 0.5
required = true
[experts]
keep = "folder/keep.json"
n_keep = 256
[source]
path = "elsewhere/source"
[draft]
mode = "drop"
[output]
layout = "fork"
[budget]
file_nbytes = 292_300_000_000
granularity = "tensor"
[budget.types]
routed = ["Q3_K"]
shared_down = ["Q8_0", "Q6_K"]
[budget.weights]
routed = 1.5
[budget.machine]
vram_nbytes = 1
"""


def test_a_dumped_recipe_is_the_same_recipe() -> None:
    recipe = parse(EVERYTHING)
    assert parse(recipe_toml(recipe)) == recipe
    assert recipe_toml(parse(recipe_toml(recipe))) == recipe_toml(recipe)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_comes_back_whole(name: str) -> None:
    recipe = shipped(name)
    assert parse(recipe_toml(recipe)) == recipe
    line = parse(recipe_line(recipe))
    assert line.output.layout == recipe.output.layout
    assert line == recipe.model_copy(update={"output": line.output})
    assert line.output.shard_nbytes == recipe.output.shard_nbytes


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_for_metadata_takes_less_than_a_kilobyte(name: str) -> None:
    assert len(recipe_line(shipped(name)).encode()) < 1000


def test_a_dump_says_what_was_left_to_defaults() -> None:
    said = tomllib.loads(recipe_toml(shipped("native")))
    # No layout: that of the source stays, if it has one.
    assert said["output"] == {"shard_nbytes": 45_000_000_000}
    mainline = tomllib.loads(recipe_toml(shipped("bpw-3.0-mainline")))
    assert mainline["output"]["layout"] == "mainline"
    assert said["draft"]["routed"] == "MXFP4"
    assert "extends" not in said


def test_metadata_says_no_layout_that_goes_without_saying() -> None:
    assert "layout" not in recipe_line(shipped("bpw-3.0-mainline"))
    assert 'output={layout="fork"}' in recipe_line(shipped("bpw-3.0"))


def test_metadata_names_no_folder_of_anyone() -> None:
    line = recipe_line(parse(EVERYTHING))
    assert "/home" not in line
    assert "folder" not in line
    brief = parse(line)
    assert (brief.imatrix.file, brief.experts.keep) == ("m.gguf", "keep.json")
    assert (brief.graft[0].origin, brief.source.path) == ("original", None)


def test_an_empty_list_of_candidates_is_kept() -> None:
    lines = '[budget]\nfile_nbytes = 1\ncandidates = ["Q2_K"]\n[budget.types]\nrouted = []\n'
    recipe = parse(EVERYTHING.split("[budget]")[0] + lines)
    assert parse(recipe_toml(recipe)) == recipe
    assert recipe.budget is not None
    assert recipe.budget.types.routed == ()


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_survives(description: str) -> None:
    try:
        description.encode()
    except UnicodeEncodeError:
        return
    recipe = parse(EVERYTHING).model_copy(update={"description": description})
    assert parse(recipe_toml(recipe)).description == description
    assert parse(recipe_line(recipe)).description == description


@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_a_recipe_told_from_types_gives_these_types(name: str) -> None:
    layout = shipped(name).output.layout
    targets = targets_of(name)
    types = resolve_types(shipped(name), targets, weighted=lambda _: True)
    told = derive_recipe(targets, types, name="told", layout=layout)
    assert resolve_types(told, targets, weighted=lambda _: True) == types
    assert told.output.layout == layout
    # Not a list of tensors: about as brief as what a person wrote.
    assert len(recipe_line(told)) < 600


@pytest.mark.parametrize("name", ["draft", "v4-native"])
def test_a_draft_told_from_types_gives_these_types(name: str) -> None:
    targets = draft_tensors(config_for(name))
    types = resolve_types(shipped(name), targets)
    told = derive_draft(targets, types, name="told")
    assert resolve_types(told, targets) == types
    assert recipe_line(told) == 'name="told"\ndraft={mode="only"}\n'


def test_a_draft_of_other_types_is_told_too() -> None:
    lines = '[draft]\nmode = "only"\nrouted = "Q2_K"\nshared_down = "Q6_K"\nmarkov = "F32"\n'
    targets = draft_tensors(config_for("draft"))
    types = resolve_types(parse(lines), targets)
    told = derive_draft(targets, types, name="told")
    assert told.draft == parse(lines).draft


CHOICES = [TYPES[name] for name in ("Q8_0", "Q4_K", "BF16", "IQ4_KS")]


@pytest.mark.parametrize("seed", range(8))
def test_types_without_any_order_are_told_too(seed: int) -> None:
    targets = target_tensors(small_v4_config(), Layout.MAINLINE)
    random = Random(seed)
    # From nearly all alike to none like the next.
    weights = (1, *(seed / 20,) * 3)
    types = {
        t.name: TYPES[t.only_type] if t.only_type else random.choices(CHOICES, weights)[0]
        for t in targets
    }
    told = derive_recipe(targets, types, name="told")
    assert {t.name: choose(told, t).type for t in targets} == types
    assert parse(recipe_toml(told)) == told


@pytest.fixture
def model(tmp_path: Path) -> GgufModel:
    return read_model(write_hollow(small_plan(Layout.FORK), tmp_path))


def types_of(model: GgufModel) -> dict[str, str]:
    return {name: tensor.type.name for name, (_, tensor) in model.tensors.items()}


FORMS = {
    "fork": lambda: small_plan(Layout.FORK, types={"blk.1.attn_q_a.weight": "Q4_0"}),
    "mainline": lambda: small_plan(Layout.MAINLINE, types={"blk.0.ffn_up_exps.weight": "Q8_0"}),
    "V4": lambda: small_plan(Layout.MAINLINE, small_v4_config()),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_recipe_is_told_from_any_file(form: str, tmp_path: Path) -> None:
    plan = FORMS[form]()
    found = recipe_of_file(read_model(write_hollow(plan, tmp_path)))
    assert (found.is_recorded, found.notes, found.recipe.name) == (False, (), "small")
    targets = [t.target for t in plan.tensors]
    assert {t.name: choose(found.recipe, t).type for t in targets} == {
        t.name: t.type for t in plan.tensors
    }
    assert found.recipe.output.layout == (plan.form.layout or Layout.MAINLINE)


@pytest.mark.parametrize("config", [small_config, small_v4_config])
def test_a_recipe_is_told_from_a_draft(config, tmp_path: Path) -> None:
    found = recipe_of_file(read_model(write_hollow(draft_plan(config()), tmp_path)))
    assert not found.recipe.makes_target
    assert found.recipe.draft.routed == found.recipe.draft.markov == "Q8_0"


RECORDED = """
name = "ours"
allow = ["larger_than_fp4"]
roles = {routed="MXFP4",engram="Q8_0",attention="Q8_0",embedding="Q8_0",shared="Q8_0"}
sub_roles = {engram_gate="BF16"}
experts = {n_keep = 4}
"""


def test_the_recipe_in_the_file_counts_if_it_is_true(model: GgufModel) -> None:
    found = recipe_of_file(with_keys(model, text(RECIPE_KEY, RECORDED)))
    assert found.is_recorded
    # With the layout that the file has, whoever chose it.
    assert found.recipe == parse(RECORDED + f'output = {{layout = "{form_of(model).layout}"}}\n')
    assert found.notes == ()


def test_a_recipe_in_the_file_that_is_not_true_is_told_anew(model: GgufModel) -> None:
    wrong = RECORDED.replace('shared="Q8_0"', 'shared="Q4_K"')
    found = recipe_of_file(with_keys(model, text(RECIPE_KEY, wrong)))
    assert not found.is_recorded
    assert found.recipe.roles.shared == "Q8_0"
    assert found.notes == (
        "the recipe stored in the file gives blk.0.ffn_gate_shexp.weight and 17 more another type",
    )


def test_a_recipe_in_the_file_that_cannot_be_read_is_told_anew(model: GgufModel) -> None:
    found = recipe_of_file(with_keys(model, text(RECIPE_KEY, 'name = "x"\ncolour = 1\n')))
    assert not found.is_recorded
    assert found.recipe == recipe_of_file(model).recipe
    assert found.notes[0].startswith("the recipe stored in the file cannot be read: ")


def test_a_broken_tensor_is_noted_and_left_out(model: GgufModel) -> None:
    name = "blk.0.hc_attn_base.weight"
    broken = with_tensors(model, tensor(model, name, type=TYPES["Q8_0"]))
    found = recipe_of_file(broken)
    assert found.notes == (f"{name} should be F32 and will be when made anew",)
    assert found.recipe == recipe_of_file(model).recipe


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ('extends="/etc/passwd"\n', "extends is not there"),
        ('extends="native"\n', "extends is not there"),
        ('override=[{match="^(.+)+Z$",type="Q8_0"}]\n', "might take for ever"),
        ('override=[{match=".*.*.*.*Z$",type="Q8_0"}]\n', "might take for ever"),
        (f'override=[{{match="{".?" * 30}ZZ",type="Q8_0"}}]\n', "might take for ever"),
    ],
)
def test_what_a_stranger_stored_opens_no_file_and_takes_no_time(
    model: GgufModel, stored: str, told: str
) -> None:
    roles = 'roles={routed="Q3_K",engram="Q3_K",attention="Q3_K",embedding="Q3_K",shared="Q3_K"}\n'
    begin = time.monotonic()
    found = recipe_of_file(with_keys(model, text(RECIPE_KEY, stored + roles)))
    assert time.monotonic() - begin < 10
    assert not found.is_recorded
    assert any(told in note for note in found.notes), found.notes


def test_a_tensor_of_an_unknown_name_is_told(model: GgufModel) -> None:
    with pytest.raises(FormatError, match="these models do not have") as caught:
        recipe_of_file(with_tensors(model, extra("blk.0.strange.weight")))
    assert caught.value.tensor == "blk.0.strange.weight"
