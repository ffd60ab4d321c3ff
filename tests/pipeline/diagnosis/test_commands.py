"""What a diagnosis tells people to type can be typed."""

import shlex
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import recipes
from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Finding, Graft, Mend, Severity, ranges, spread
from pipeline.diagnosis.repair import repair_recipe
from pipeline.model.layout import Layout
from pipeline.model.roles import SubRole
from tasks.recipe_file import SHIPPED, read_recipe

ROOT = Path(recipes.__file__).parents[1]
FILE = Path("a model.gguf")

TASKS = {
    "as is": commands.keep_all(FILE, Layout.FORK),
    "as is, V4": commands.keep_all(FILE, None),
    "graft": commands.graft(FILE, Layout.MAINLINE),
    "draft": commands.make_draft(),
    "convert": commands.convert(),
    "relayout": commands.relayout(FILE, Layout.FORK),
    "inspect": commands.inspect(FILE),
}


@pytest.mark.parametrize("command", TASKS.values(), ids=TASKS)
def test_every_task_and_option_exists(command):
    script, task, *words = shlex.split(command)
    assert (ROOT / script).is_file()
    options = {name.replace("_", "-") for name, _ in getattr(recipes, task).get_params()}
    assert {word[2:] for word in words if word.startswith("--")} <= options
    named = dict(zip(words[::2], words[1::2], strict=True))
    recipe = named.get("--recipe", "native")
    ours = (commands.RECIPE_FILE, commands.RECIPE)
    assert recipe in ours or (SHIPPED / f"{recipe}.toml").is_file()


@pytest.mark.parametrize("command", [commands.recipe_from(FILE), commands.doctor(FILE)])
def test_every_script_exists(command):
    assert (ROOT / shlex.split(command)[0]).is_file()


def test_the_program_that_sets_a_key_is_installed():
    program = Path(shlex.split(commands.set_key(FILE, "split.count", 4))[0])
    assert program.parent == Path(".venv/bin")
    (point,) = entry_points(group="console_scripts", name=program.name)
    assert point.dist.name == "gguf"


def test_no_run_begins_where_no_recipe_was_told():
    told, then = commands.convert_alike(FILE).split(" && ")
    assert told == f"{commands.recipe_from(FILE)} > {commands.ALIKE_FILE}"
    assert then == commands.convert(commands.ALIKE_FILE)


def finding(*grafts):
    return Finding(Severity.LOSES, "", mend=Mend("", grafts=grafts))


def test_the_repair_recipe_is_one(tmp_path):
    text = repair_recipe(
        [
            finding(Graft(SubRole.HYPER_CONNECTION, "F32")),
            finding(Graft(SubRole.ROUTED_DOWN, "MXFP4", (0, 1, 5)), Graft(SubRole.ROUTER, "BF16")),
            finding(Graft(SubRole.HYPER_CONNECTION, "F32")),
        ]
    )
    assert text is not None
    said = tomllib.loads(text)
    assert said["graft"] == [
        {"from": "original", "sub_roles": ["hyper_connection", "router"]},
        {"from": "original", "sub_roles": ["routed_down"], "layers": "0-1,5"},
    ]
    assert [(o["type"], o["sub_roles"]) for o in said["override"]] == [
        ("F32", ["hyper_connection"]),
        ("MXFP4", ["routed_down"]),
        ("BF16", ["router"]),
    ]
    (tmp_path / "mend.toml").write_text(text)
    recipe = read_recipe(str(tmp_path / "mend.toml"))
    assert len(recipe.override) == 3


def test_no_graft_no_recipe():
    assert repair_recipe([finding()]) is None


def test_layers_are_drawn_together():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    names = ["blk.0.x.weight", "blk.1.x.weight", "blk.0.y.weight", "output.weight"]
    assert spread(names) == "blk.0-1.x.weight, blk.0.y.weight, output.weight"
