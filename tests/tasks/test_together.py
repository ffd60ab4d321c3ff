"""Several recipes in one command: the same files as one by one, in one pass."""

import os
import signal
import subprocess
import time

import pytest

from pipeline.store import ShardStore
from tests.pipeline.filling import MIXED
from tests.tasks.commands import command, files_of, luigi, run_recipe

pytestmark = pytest.mark.slow


def run_recipes(source, recipes, *more):
    return ("RunRecipes", "--source", source, "--recipe", recipes, "--name", "mini", *more)


@pytest.fixture(scope="module")
def one_by_one(small_miniature, tmp_path_factory):
    """The digests of both recipes' files, each run alone."""
    cwd = tmp_path_factory.mktemp("one by one")
    (cwd / "mixed.toml").write_text(MIXED)
    for recipe in ("native", "mixed.toml"):
        assert luigi(*run_recipe(small_miniature, recipe), cwd=cwd).returncode == 0
    return sums_of(cwd)


@pytest.fixture
def cwd(tmp_path):
    (tmp_path / "mixed.toml").write_text(MIXED)
    return tmp_path


def sums_of(cwd):
    paths = (cwd / "out").glob("*/SHA256SUMS")
    return {
        path.parent.name: [line for line in path.read_text().splitlines() if ".gguf" in line]
        for path in paths
    }


def test_the_files_are_those_of_one_by_one_and_lie_on_the_disk_once(
    small_miniature, cwd, one_by_one
):
    words = run_recipes(small_miniature, "native,mixed.toml")
    result = luigi(*words, cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert sums_of(cwd) == one_by_one
    assert "9 shards together" in result.stderr
    assert all(path.stat().st_nlink >= 2 for path in cwd.rglob("shard.gguf"))
    before = files_of(cwd)
    again = luigi(*words, cwd=cwd)
    assert again.returncode == 0
    assert files_of(cwd) == before


def test_killed_in_the_middle_it_goes_on(small_miniature, cwd, one_by_one):
    words = run_recipes(small_miniature, "native,mixed.toml", "--threads", "1")
    process = subprocess.Popen(
        command(*words),
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(cwd.rglob("*.journal")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = luigi(*words, cwd=cwd)
    assert result.returncode == 0, result.stderr
    assert sums_of(cwd) == one_by_one
    assert not list(cwd.rglob("*.part"))
    assert ShardStore(cwd / "out" / ".quantmill").root.exists()


@pytest.mark.parametrize("recipes", ["native,native", ","])
def test_a_list_that_is_none_is_refused(small_miniature, cwd, recipes):
    result = luigi(*run_recipes(small_miniature, recipes), cwd=cwd)
    assert result.returncode == 35
    assert "--recipe must name recipes, each once" in result.stderr
