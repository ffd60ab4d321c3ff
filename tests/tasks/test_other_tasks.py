"""Planning, engram check and relayout from the command line."""

import json
import shutil
import subprocess
import sys

import pytest

from pipeline.miniature.hollow import write_headers_only
from tasks.clean import unused
from tests.promises.whole_job import run_job
from tests.tasks.commands import files_of, luigi, run_recipe


@pytest.fixture(scope="session")
def outputs(small_miniature, tmp_path_factory):
    """A folder in which the native recipe has run in both layouts."""
    out = tmp_path_factory.mktemp("both layouts") / "out"
    for layout in ("mainline", "fork"):
        outcome = run_job(small_miniature, out, layout=layout)
        assert outcome.ok, outcome.text
    return out


def test_plan_prints_exact_bytes_and_writes_nothing(small_miniature, outputs, tmp_path):
    words = ("--source", small_miniature, "--recipe", "native", "--name", "mini")
    result = luigi("PlanRecipe", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
    for path in (outputs / "mini-native-mainline").glob("*.gguf"):
        line = next(x for x in result.stdout.splitlines() if x.startswith(path.name))
        assert f"{path.stat().st_size:,}" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("like", "total"), [("v4.1-flash", "510,286,023,000"), ("v4-flash-0731", "166,878,536,440")]
)
def test_inspect_adds_up_the_full_size_models(tmp_path, like, total):
    write_headers_only(tmp_path / "full", like=like, tokenizer=None)
    result = luigi("InspectSource", "--source", "full", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "48 shards, all parts agree" in result.stdout
    assert total in result.stdout


@pytest.mark.parametrize("layout", ["mainline", pytest.param("fork", marks=pytest.mark.slow)])
def test_check_engram_passes_on_an_output(outputs, layout):
    result = luigi("CheckEngram", "--path", outputs / f"mini-native-{layout}", cwd=outputs)
    assert result.returncode == 0, result.stderr
    assert "WRONG" not in result.stdout


@pytest.mark.slow
def test_check_engram_passes_on_the_source(small_miniature, tmp_path):
    assert luigi("CheckEngram", "--path", small_miniature, cwd=tmp_path).returncode == 0


def test_check_engram_fails_on_a_wrong_row_count(small_miniature, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(small_miniature, source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][1] += 1
    (source / "config.json").write_text(json.dumps(config))
    result = luigi("CheckEngram", "--path", source, cwd=tmp_path)
    assert result.returncode == 30
    assert "WRONG" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_relayout_gives_what_the_recipe_gives(outputs, tmp_path):
    words = ("--path", outputs / "mini-native-fork", "--layout", "mainline", "--out", "moved")
    result = luigi("Relayout", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = sorted((tmp_path / "moved").glob("*.gguf"))
    wanted = sorted((outputs / "mini-native-mainline").glob("*.gguf"))
    assert [path.name for path in made] == [path.name for path in wanted]
    for one, other in zip(made[1:], wanted[1:], strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert luigi("VerifyOutput", "--path", "moved", cwd=tmp_path).returncode == 0
    before = files_of(tmp_path / "moved")
    again = luigi("Relayout", *words, cwd=tmp_path)
    assert again.returncode == 30
    assert "Traceback" not in again.stderr
    assert files_of(tmp_path / "moved") == before


@pytest.mark.slow
def test_relayout_carries_no_damage_on(outputs, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(outputs / "mini-native-fork", folder)
    shard = sorted(folder.glob("*.gguf"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    result = luigi("Relayout", "--path", folder, "--layout", "mainline", cwd=tmp_path)
    assert result.returncode == 30
    assert "the bytes differ from their digest" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_importing_the_tasks_is_light():
    """Every command and every task process pays for what this imports."""
    code = "import sys, recipes; print(sorted({'torch', 'matplotlib', 'sympy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.slow
def test_a_trial_fills_some_layers_and_a_full_run_goes_on(small_miniature, outputs, tmp_path):
    words = ("--source", small_miniature, "--recipe", "native", "--name", "mini")
    trial = luigi("TryLayers", "--layers", "2-3", *words, cwd=tmp_path)
    assert trial.returncode == 0, trial.stderr
    assert "measured error by role" in trial.stdout
    assert not list(tmp_path.rglob("*.gguf"))
    assert luigi("TryLayers", "--layers", "7-9", *words, cwd=tmp_path).returncode == 35
    assert luigi("RunRecipe", *words, cwd=tmp_path).returncode == 0
    for path in (tmp_path / "out/mini-native-mainline").glob("*.gguf"):
        assert path.read_bytes() == (outputs / "mini-native-mainline" / path.name).read_bytes()


@pytest.mark.slow
def test_clean_names_only_what_no_output_shows(small_miniature, tmp_path):
    assert luigi(*run_recipe(small_miniature), cwd=tmp_path).returncode == 0
    store = tmp_path / "out" / ".quantmill"
    assert unused(tmp_path / "out") == []
    (store / ("0" * 16)).mkdir()
    assert [folder.name for folder in unused(tmp_path / "out")] == ["0" * 16]
    shutil.rmtree(tmp_path / "out" / "mini-native-mainline")
    assert len(unused(tmp_path / "out")) == 6
