"""P16: the same spec gives the same bytes, wherever, however and whenever it runs.

A clock that jumps cannot be had without privileges or a preloaded library; what of the time could
reach the output are the times of files, and those are changed here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises.whole_job import NAME, assert_right, finals, linked_copy, run_job
from tests.tasks.commands import luigi, run_recipe

ELSEWHERE = """
import os, sys
os.umask(int(sys.argv[4], 8))
from tests.promises.whole_job import run_job

outcome = run_job(sys.argv[1], sys.argv[2], threads=int(sys.argv[3]))
assert outcome.ok, outcome.text
"""

ROOT = Path(__file__).parents[2]

PLACES = {
    "C locale": {"LC_ALL": "C", "LANG": "C"},
    "ASCII only": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "Turkish": {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
    "German": {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"},
    "another hash seed": {"PYTHONHASHSEED": "4711"},
    "another time zone": {"TZ": "Pacific/Kiritimati"},
}
EVERYTHING = {
    **PLACES["ASCII only"],
    **PLACES["another hash seed"],
    **PLACES["another time zone"],
}


def run_elsewhere(source, cwd, *, n_threads=2, umask="022", **environment):
    """The job in another process and folder, by relative paths."""
    cwd.mkdir()
    code = os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.fspath(ROOT)])
    words = [os.path.relpath(source, cwd), "out", str(n_threads), umask]
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *words],
        cwd=cwd,
        env={**os.environ, **environment, "PYTHONPATH": code},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return cwd / "out"


@pytest.mark.slow
def test_p16_everything_else_at_once_changes_no_byte(small_miniature, tmp_path, wanted):
    out = run_elsewhere(
        small_miniature, tmp_path / "elsewhere", n_threads=4, umask="077", **EVERYTHING
    )
    assert_right(out, wanted)
    modes = {path.stat().st_mode & 0o077 for path in out.rglob("*")}
    assert modes == {0}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_p16_another_place_changes_no_byte(small_miniature, tmp_path, wanted, place):
    assert_right(run_elsewhere(small_miniature, tmp_path / "cwd", **PLACES[place]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("n_threads", [1, 4])
def test_p16_threads_change_no_byte(small_miniature, tmp_path, wanted, n_threads):
    assert run_job(small_miniature, tmp_path / "out", threads=n_threads).ok
    assert_right(tmp_path / "out", wanted)


@pytest.mark.slow
def test_p16_processes_side_by_side_change_no_byte(small_miniature, tmp_path, wanted):
    result = luigi(*run_recipe(small_miniature), "--workers", 3, "--threads", 1, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_right(tmp_path / "out", wanted)


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0, id="1970", marks=pytest.mark.slow), pytest.param(4_000_000_000, id="2096")],
)
def test_p16_no_time_is_in_a_file(small_miniature, tmp_path, undisturbed, seconds):
    """Other times of the source files are another spec, but the same shards byte for byte."""
    copy = tmp_path / small_miniature.name
    linked_copy(small_miniature, copy, but=[path.name for path in small_miniature.iterdir()])
    for path in copy.iterdir():
        os.utime(path, (seconds, seconds))
    assert run_job(copy, tmp_path / "out").ok
    mine, theirs = finals(tmp_path / "out" / NAME), finals(undisturbed / NAME)
    differing = {name for name in theirs if mine[name] != theirs[name]}
    assert differing == {"plan.json", "manifest.json"}  # they name specs
