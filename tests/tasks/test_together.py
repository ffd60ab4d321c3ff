"""Several recipes in one command: the same files as one by one, in one pass."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from pipeline.errors import RecipeError
from pipeline.store import ShardStore
from tasks.job import Job
from tasks.request import JobParameters
from tasks.together import FillTogether, RunRecipes
from tests.pipeline.filling import MIXED
from tests.pipeline.importance.writing import write_imatrix
from tests.tasks.commands import command, files_of, luigi, run_recipe


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def together(source, recipes, out, **more):
    return RunRecipes(source=str(source), recipe=recipes, out=str(out), name="mini", **more)


@pytest.mark.parametrize("recipes", ["native,native", ","])
def test_a_list_that_is_none_is_refused(small_miniature, tmp_path, recipes):
    with pytest.raises(RecipeError, match="--recipe must name recipes, each once"):
        list(together(small_miniature, recipes, tmp_path).requires())


def test_two_recipes_of_one_name_are_refused(small_miniature, tmp_path):
    """Each would undo what the other has put into the one folder."""
    for folder, content in (("x", MIXED), ("y", MIXED.replace("Q6_K", "Q5_K"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.toml").write_text(content)
    recipes = f"{tmp_path / 'x' / 'same.toml'},{tmp_path / 'y' / 'same.toml'}"
    with pytest.raises(RecipeError, match="two recipes have one name"):
        list(together(small_miniature, recipes, tmp_path / "out").requires())


def test_recipes_with_grafts_from_different_places_read_all_of_them(small_miniature, tmp_path):
    """Each job sees only its own grafts beside the source."""
    for name, role in (("one", "routed"), ("other", "shared")):
        place = tmp_path / f"{name} checkpoint"
        # Another time of change, so another source.
        shutil.copytree(small_miniature, place, copy_function=shutil.copy)
        graft = f'[[graft]]\nfrom = "{place}"\nroles = ["{role}"]\n'
        (tmp_path / f"{name}.toml").write_text(MIXED + graft)
    recipes = ",".join(str(tmp_path / f"{name}.toml") for name in ("one", "other"))
    task = FillTogether.of(together(small_miniature, recipes, tmp_path / "out"))
    checkpoint = task._readable()
    for job in task.jobs:
        for tensor in job.tensors:
            for name in tensor.source_names:
                checkpoint.locate(name)


def test_a_graft_is_given_to_the_recipes_that_take_it(small_miniature, tmp_path):
    graft = '[[graft]]\nfrom = "original"\nroles = ["shared"]\n'
    (tmp_path / "grafted.toml").write_text(MIXED + graft)
    recipes = f"native,{tmp_path / 'grafted.toml'}"
    given = {"graft": f"original={small_miniature}"}
    native, grafted = together(small_miniature, recipes, tmp_path / "out", **given).requires()
    assert native.job.parameters.graft == ""
    assert grafted.job.parameters.graft == given["graft"]
    assert [job.name for job in FillTogether.of(grafted).jobs] == [
        native.job.name,
        grafted.job.name,
    ]
    with pytest.raises(RecipeError, match="takes nothing from original"):
        list(together(small_miniature, "native,draft", tmp_path / "out", **given).requires())


def test_recipes_that_read_different_sources_are_refused(small_miniature, tmp_path):
    """Rows are joined by the names of what they are stored as."""
    for name in ("a", "b"):
        shutil.copytree(small_miniature, tmp_path / f"{name} source", copy_function=shutil.copy)
        own = f'[source]\npath = "{tmp_path / name} source"\n'
        (tmp_path / f"{name}.toml").write_text(MIXED + own)
    recipes = ",".join(str(tmp_path / f"{name}.toml") for name in "ab")
    with pytest.raises(RecipeError, match="recipes of one pass read one source"):
        list(together("", recipes, tmp_path / "out").requires())


def test_a_matrix_that_a_recipe_does_not_use_is_not_in_its_metadata(small_miniature, tmp_path):
    plain = Job(JobParameters(str(small_miniature), "native", str(tmp_path / "out")))
    targets = [tensor.target for tensor in plain.plans[0].tensors]
    imatrix = str(write_imatrix(tmp_path / "i.gguf", targets))
    made = {"native": False, "lowbit-q2_k": True}
    for recipe, uses in made.items():
        parameters = JobParameters(
            str(small_miniature), recipe, str(tmp_path / "out"), imatrix=imatrix
        )
        keys = {entry.key for entry in Job(parameters).plans[0].key_values}
        assert ("quantize.imatrix.file" in keys) == uses
