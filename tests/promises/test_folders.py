"""Folders as people have them: the source's own, shared, foreign, read-only, oddly named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import OutputError
from tests.promises.test_disks import can_mount
from tests.promises.whole_job import NAME, assert_right, finals, linked_copy, run_job


@pytest.fixture
def source(small_miniature, tmp_path):
    """A checkpoint that a test may harm: real copies of all its files."""
    names = [path.name for path in small_miniature.iterdir()]
    return linked_copy(small_miniature, tmp_path / small_miniature.name, but=names)


def state(source):
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size)
        for path in source.iterdir()
        if path.is_file()
    }


PLACES = {
    "inside the source": lambda source: source / "gguf",
    "the source itself": lambda source: source,
    "a link to the source": lambda source: link(source.parent / "link", source),
    "a link to elsewhere": lambda source: link(source.parent / "link", source.parent / "there"),
    "above the source": lambda source: source.parent,
}


def link(name, target):
    target.mkdir(exist_ok=True)
    name.symlink_to(target)
    return name


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if "the source itself" in place else pytest.mark.slow)
        for place in PLACES
    ],
)
def test_an_output_anywhere_leaves_the_source_as_it_is(source, wanted, place):
    before, out = state(source), PLACES[place](source)
    outcome = run_job(source, out)
    assert outcome.ok, outcome.text
    assert state(source) == before
    made = {name: digest for name, digest in finals(out).items() if name in wanted}
    assert made == wanted
    again = {path: path.stat().st_mtime_ns for path in (out / NAME).iterdir()}
    assert run_job(source, out).ok
    assert {path: path.stat().st_mtime_ns for path in (out / NAME).iterdir()} == again


def test_an_output_folder_named_like_the_source_leaves_it_alone(small_miniature, tmp_path, wanted):
    """The checkpoint lies where the finished files are to be shown."""
    source = linked_copy(small_miniature, tmp_path / NAME)
    before = state(source)
    assert run_job(source, tmp_path).ok
    assert {name: s for name, s in state(source).items() if name in before} == before
    shards = [name for name in wanted if name.endswith(".gguf")]
    found = finals(tmp_path)
    assert [found[name] for name in shards] == [wanted[name] for name in shards]


def test_files_of_others_in_the_output_folder_stay(small_miniature, tmp_path, wanted):
    folder = tmp_path / "out" / NAME
    folder.mkdir(parents=True)
    foreign = ["notes.txt", "other-00001-of-00002.gguf", f"{NAME}-lora-00001-of-00002.gguf"]
    for name in foreign:
        (folder / name).write_text("theirs")
    assert run_job(small_miniature, tmp_path / "out").ok
    assert {path.name for path in folder.iterdir()} == {*foreign, *shown(wanted)}
    assert {(folder / name).read_text() for name in foreign} == {"theirs"}


def shown(names):
    return {name.partition("/")[2] for name in names if name.startswith(NAME)}


def test_a_file_of_others_under_a_name_of_ours_is_not_replaced(small_miniature, tmp_path):
    victim = tmp_path / "out" / NAME / f"{NAME}-00002-of-00004.gguf"
    victim.parent.mkdir(parents=True)
    victim.write_text("theirs")
    outcome = run_job(small_miniature, tmp_path / "out")
    assert not outcome.ok
    assert str(victim) in outcome.text
    assert victim.read_text() == "theirs"
    victim.unlink()
    assert run_job(small_miniature, tmp_path / "out").ok


@pytest.mark.slow
def test_shards_of_an_earlier_division_are_taken_away(
    small_miniature, tmp_path, wanted, pytestconfig
):
    """Nine files of the same name before, four now: a loader must not find both."""
    recipe = tmp_path / "native.toml"
    native = (pytestconfig.rootpath / "recipes" / "native.toml").read_text()
    recipe.write_text(native + "\n[output]\nshard_nbytes = 1_048_576\n")
    assert run_job(small_miniature, tmp_path / "out", recipe).ok
    folder = tmp_path / "out" / NAME
    assert len(list(folder.glob("*.gguf"))) > 4
    assert run_job(small_miniature, tmp_path / "out").ok
    assert {path.name for path in folder.iterdir()} == shown(wanted)


@pytest.mark.slow
def test_two_recipes_share_a_folder(small_miniature, tmp_path, wanted):
    out = tmp_path / "out"
    assert run_job(small_miniature, out, "lowbit-q2_k").ok
    other = finals(out)
    assert run_job(small_miniature, out).ok
    found = finals(out)
    assert {name: found[name] for name in other} == other
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("what", ["out", f"out/{NAME}", "out/.quantmill"])
def test_a_file_where_a_folder_should_be_is_told(small_miniature, tmp_path, what):
    (tmp_path / what).parent.mkdir(exist_ok=True)
    (tmp_path / what).write_text("theirs")
    outcome = run_job(small_miniature, tmp_path / "out")
    assert not outcome.ok
    assert all(isinstance(error, OutputError) for error in outcome.errors), outcome.errors
    assert str(tmp_path / "out") in outcome.text
    assert (tmp_path / what).read_text() == "theirs"


READ_ONLY = """
import json, subprocess, sys
from pathlib import Path
from pipeline.errors import OutputError
from tests.promises.whole_job import finals, run_job

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
wanted = json.loads(sys.stdin.read())
(folder / "out").mkdir()
(folder / source.name).mkdir()
subprocess.run(["mount", "--bind", source, folder / source.name], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", folder / source.name], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder / "out"], check=True)

refused = run_job(folder / source.name, folder / "out")
assert not refused.ok
assert all(isinstance(error, OutputError) for error in refused.errors), refused.errors
assert "Choose an output folder" in refused.text, refused.text

subprocess.run(["mount", "-o", "remount,rw", folder / "out"], check=True)
done = run_job(folder / source.name, folder / "out")
assert done.ok, done.text
assert finals(folder / "out") == wanted
"""


@pytest.mark.slow
def test_a_read_only_source_will_do_and_a_read_only_output_is_told(
    small_miniature, tmp_path, wanted
):
    """Mounted so, in a namespace of the test's own: root may write where modes forbid it."""
    if not can_mount():
        pytest.skip("needs the right to mount in a namespace of its own")
    result = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", READ_ONLY, str(small_miniature), str(tmp_path)],
        input=json.dumps(wanted),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize(
    "name",
    [
        "Größe, zwei  Leerzeichen, %20 'q' $HOME",
        pytest.param("модель\tβ", marks=pytest.mark.slow),
        pytest.param("-dash", marks=pytest.mark.slow),
    ],
)
def test_odd_names_are_only_names(small_miniature, tmp_path, wanted, name):
    source = linked_copy(small_miniature, tmp_path / name / small_miniature.name)
    out = tmp_path / f"out {name}"
    assert run_job(source, out).ok
    assert_right(out, wanted)
    shutil.rmtree(out)
