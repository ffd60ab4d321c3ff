"""Planning, engram check and relayout from the command line."""

import json
import shutil

import pytest

from pipeline.miniature.hollow import write_headers_only
from tests.tasks.commands import files_of, luigi, run_recipe


def test_plan_prints_exact_bytes_and_writes_nothing(miniature, tmp_path):
    words = ("--source", miniature, "--recipe", "native", "--name", "mini")
    result = luigi("PlanRecipe", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []
    assert luigi(*run_recipe(miniature), cwd=tmp_path).returncode == 0
    for path in (tmp_path / "out/mini-native-mainline").glob("*.gguf"):
        line = next(x for x in result.stdout.splitlines() if x.startswith(path.name))
        assert f"{path.stat().st_size:,}" in line


@pytest.mark.parametrize(
    ("like", "total"), [("v4.1-flash", "510,286,023,000"), ("v4-flash-0731", "166,878,536,440")]
)
def test_inspect_adds_up_the_full_size_models(tmp_path, like, total):
    write_headers_only(tmp_path / "full", like=like, tokenizer=None)
    result = luigi("InspectSource", "--source", "full", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "48 shards, all parts agree" in result.stdout
    assert total in result.stdout


@pytest.mark.parametrize("layout", ["mainline", "fork"])
def test_check_engram_passes_on_source_and_output(miniature, tmp_path, layout):
    assert luigi("CheckEngram", "--path", miniature, cwd=tmp_path).returncode == 0
    run = luigi(*run_recipe(miniature, "native", "--layout", layout), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    result = luigi("CheckEngram", "--path", f"out/mini-native-{layout}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "WRONG" not in result.stdout


def test_check_engram_fails_on_a_wrong_row_count(miniature, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(miniature, source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][1] += 1
    (source / "config.json").write_text(json.dumps(config))
    result = luigi("CheckEngram", "--path", source, cwd=tmp_path)
    assert result.returncode == 30
    assert "WRONG" in result.stdout
    assert "Traceback" not in result.stderr


def test_relayout_gives_what_the_recipe_gives(miniature, tmp_path):
    for layout in ("mainline", "fork"):
        run = luigi(*run_recipe(miniature, "native", "--layout", layout), cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    out = tmp_path / "out"
    words = ("--path", out / "mini-native-fork", "--layout", "mainline", "--out", "moved")
    result = luigi("Relayout", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = sorted((tmp_path / "moved").glob("*.gguf"))
    wanted = sorted((out / "mini-native-mainline").glob("*.gguf"))
    assert len(made) == len(wanted) == 4
    for one, other in zip(made[1:], wanted[1:], strict=True):
        assert one.read_bytes() == other.read_bytes()
    before = files_of(tmp_path / "moved")
    again = luigi("Relayout", *words, cwd=tmp_path)
    assert again.returncode == 30
    assert "Traceback" not in again.stderr
    assert files_of(tmp_path / "moved") == before
