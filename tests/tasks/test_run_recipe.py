"""The main job from the command line: results, exit codes, and what runs again."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.tasks.commands import command, files_of, luigi, run_recipe


@pytest.fixture(scope="session")
def finished(small_miniature, tmp_path_factory):
    """A folder in which the native recipe has run once."""
    cwd = tmp_path_factory.mktemp("finished run")
    result = luigi(*run_recipe(small_miniature), cwd=cwd)
    assert result.returncode == 0, result.stderr
    return cwd, result


def copied(finished, tmp_path):
    cwd = tmp_path / "copy"
    shutil.copytree(finished[0], cwd, copy_function=shutil.copy2)
    return cwd


def test_it_leaves_shards_reports_inventory_and_manifest(finished):
    folder = finished[0] / "out" / "mini-native-mainline"
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        assert (folder / entry["file"]).stat().st_size == entry["nbytes"]
    listed = {entry["file"] for entry in manifest["files"]}
    present = {path.name for path in folder.iterdir()}
    assert present - listed == {"manifest.json", "SHA256SUMS", "plan.json"}
    assert not list(finished[0].rglob("*.part"))
    assert not list(finished[0].rglob("*.journal"))


def test_sha256sum_itself_agrees(finished):
    folder = finished[0] / "out" / "mini-native-mainline"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_every_step_of_the_budget_is_told(finished):
    cwd, result = finished
    budget = json.loads((cwd / "out/mini-native-mainline/budget.json").read_text())
    assert [step["step"] for step in budget["steps"]] == ["source", "plan", "written", "final"]
    plan, written, final = (step["nbytes"] for step in budget["steps"][1:])
    assert plan == written == final
    assert "written: 5 of 5 shards" in result.stdout
    assert "vision, not carried" in result.stdout
    assert "draft (MTP)" in result.stdout


def test_a_second_run_does_nothing(finished, small_miniature):
    before = files_of(finished[0])
    result = luigi(*run_recipe(small_miniature), cwd=finished[0])
    assert result.returncode == 0
    assert files_of(finished[0]) == before


@pytest.mark.slow
def test_another_threads_value_does_nothing_either(finished, small_miniature):
    before = files_of(finished[0])
    result = luigi(*run_recipe(small_miniature, "native", "--threads", 1), cwd=finished[0])
    assert result.returncode == 0
    assert files_of(finished[0]) == before


def stored_shards(cwd):
    return {path.parent.name for path in cwd.glob("out/.quantmill/*/shard.gguf")}


@pytest.mark.slow
def test_the_other_layout_shares_the_expert_shards(finished, small_miniature, tmp_path):
    cwd = copied(finished, tmp_path)
    before = stored_shards(cwd)
    result = luigi(*run_recipe(small_miniature, "native", "--layout", "fork"), cwd=cwd)
    assert result.returncode == 0, result.stderr
    made = stored_shards(cwd) - before
    assert len(made) == 3  # dense and two engram tables; the expert shard was there
    names = ["mini-native-mainline", "mini-native-fork"]
    last = [cwd / "out" / name / f"{name}-00004-of-00004.gguf" for name in names]
    assert last[0].read_bytes() == last[1].read_bytes()


@pytest.mark.slow
def test_a_changed_type_remakes_only_its_shards(finished, small_miniature, tmp_path):
    cwd = copied(finished, tmp_path)
    recipe = (Path(__file__).parents[2] / "recipes" / "native.toml").read_text()
    (cwd / "native.toml").write_text(recipe.replace('routed = "MXFP4"', 'routed = "Q3_K"'))
    before = files_of(cwd / "out")
    result = luigi(*run_recipe(small_miniature, cwd / "native.toml"), cwd=cwd)
    assert result.returncode == 0, result.stderr
    kept = {name for name, state in files_of(cwd / "out").items() if before.get(name) == state}
    shards = {name for name in before if name.endswith("shard.gguf")}
    assert shards <= kept  # nothing stored before was touched
    # The first shard's metadata names the file type, the last holds the experts.
    assert len(stored_shards(cwd)) == len(shards) + 2


@pytest.mark.slow
def test_a_changed_source_file_remakes_only_what_reads_it(finished, small_miniature, tmp_path):
    cwd, source = copied(finished, tmp_path), tmp_path / "source"
    shutil.copytree(small_miniature, source)
    before = stored_shards(cwd)
    shard = sorted(source.glob("*.safetensors"))[-1]  # the second engram layer's table
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = luigi(*run_recipe(source), cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert len(stored_shards(cwd) - before) == 2  # joined table; the engram's own projections


@pytest.mark.slow
def test_a_damaged_output_is_made_good(finished, small_miniature, tmp_path):
    cwd = copied(finished, tmp_path)
    shard = next((cwd / "out/.quantmill").glob("*/shard.gguf"))
    os.truncate(shard, 1000)
    result = luigi(*run_recipe(small_miniature), cwd=cwd)
    assert result.returncode == 0, result.stderr
    result = luigi("VerifyOutput", "--path", "out/mini-native-mainline", cwd=cwd)
    assert result.returncode == 0, result.stderr


def test_verify_names_a_flipped_bit(finished, tmp_path):
    cwd = copied(finished, tmp_path)
    folder = cwd / "out" / "mini-native-mainline"
    shard = folder / "mini-native-mainline-00002-of-00004.gguf"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    result = luigi("VerifyOutput", "--path", folder, cwd=cwd)
    assert result.returncode == 30
    assert "the bytes differ from their digest" in result.stderr
    assert shard.name in result.stderr


BAD_RUNS = {
    "no such recipe": (("--recipe", "nativ"), "Did you mean native?"),
    "no such source": (("--source", "nowhere"), "nowhere"),
    "no such layout": (("--layout", "sideways"), "mainline or fork"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name == "no such recipe" else pytest.mark.slow)
        for name, case in BAD_RUNS.items()
    ],
)
def test_a_wrong_command_fails_with_one_clear_message(small_miniature, tmp_path, case):
    words, message = case
    given = {"--recipe": "native", "--source": str(small_miniature), **dict([words])}
    result = luigi("RunRecipe", *(w for pair in given.items() for w in pair), cwd=tmp_path)
    assert result.returncode == 35
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_wrong_recipe_fails_before_anything_is_written(small_miniature, tmp_path):
    (tmp_path / "bad.toml").write_text('[roles]\nrouted = "Q3_K"\nengrams = "Q8_0"\n')
    result = luigi(*run_recipe(small_miniature, "bad.toml"), cwd=tmp_path)
    assert result.returncode == 35
    assert "unknown key roles.engrams" in result.stderr
    assert "roles.attention is missing" in result.stderr
    assert not (tmp_path / "out").exists()


def aborted(cwd, *words):
    line = command()
    line[line.index("recipes")] = "aborting"
    return subprocess.run(
        [*line, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_an_aborting_quantizer_is_named_in_a_pass_over_several_recipes(small_miniature, tmp_path):
    recipes = ("--together", "native,served-lean")
    result = aborted(tmp_path, "AbortingTogether", *run_recipe(small_miniature)[1:], *recipes)
    assert result.returncode == 30, result.stderr
    assert "the process that filled the shards together died" in result.stderr
    assert re.search(r"at work on .*\.weight \(layers\.", result.stderr)


@pytest.mark.slow
def test_an_aborting_quantizer_kills_one_task_and_is_named(small_miniature, tmp_path):
    result = aborted(tmp_path, "AbortingRecipe", *run_recipe(small_miniature)[1:])
    assert result.returncode == 30, result.stderr
    assert "died" in result.stderr
    assert "exit code -6" in result.stderr
    assert re.search(r"at work on .*\.weight \(layers\.", result.stderr)
    # The shard without a Q8_0 tensor was made all the same.
    assert len(stored_shards(tmp_path)) == 1


def alive(session):
    """Processes of a session that still run; ended ones that nobody has reaped do not."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != "zombie":
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.slow
def test_sigterm_leaves_no_child_and_no_final_name(small_miniature, tmp_path):
    run = subprocess.Popen(
        command(*run_recipe(small_miniature)),
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/.quantmill/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.terminate()
    run.wait(timeout=120)
    assert run.returncode != 0
    deadline = time.monotonic() + 60
    while alive(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(run.pid) == []
    assert luigi(*run_recipe(small_miniature), cwd=tmp_path).returncode == 0
