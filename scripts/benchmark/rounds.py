"""Rounds of measurements, each taken in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from benchmark.meter import Numbers
from pipeline.errors import OutputError

Rounds = Mapping[str, Sequence[Numbers]]
"""What each measurement gave, round by round, under the keys of `steps`."""

SCRIPTS = Path(__file__).resolve().parents[1]
"""Where a measuring process finds this package, which is never installed."""

SAMPLE_SECONDS = 0.02
"""How often the memory of a measuring process is looked at."""


def steps(q3_k: Path, n_threads: int) -> dict[str, tuple[str, ...]]:
    """What is run in every round, under short keys."""
    experts = ("--recipe", str(q3_k), "--kind", "experts", "--threads")
    native = ("--recipe", "native", "--threads", str(n_threads))
    return {
        "one": ("fill", *experts, "1"),
        "many": ("fill", *experts, str(n_threads)),
        "kernel_one": ("kernel", *experts, "1"),
        "kernel_many": ("kernel", *experts, str(n_threads)),
        "native": ("fill", *native),
        "copy": ("copy", *native),
        "rates": ("rates",),
    }


def run_rounds(todo: Mapping[str, Sequence[str]], n_rounds: int, out: Path) -> Rounds:
    """All steps of a round one after the other, then the next round."""
    rounds: dict[str, list[Numbers]] = {key: [] for key in todo}
    turns = [key for _ in range(n_rounds) for key in todo]
    for key in tqdm(turns, unit="step", disable=None):
        try:
            rounds[key].append(run_child(todo[key]))
        finally:
            shutil.rmtree(out, ignore_errors=True)
    return rounds


def run_child(words: Sequence[str]) -> Numbers:
    """One measurement in a fresh process, with the peak of its anonymous memory.

    Raises:
        OutputError: It failed; it has said why.
    """
    peak = 0
    # -P: a `tasks` or `benchmark` in the caller's folder must not be taken for ours.
    command = [sys.executable, "-P", "-m", "benchmark.child", *words]
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdout=subprocess.PIPE, text=True, env=environment()
    ) as child:
        while child.poll() is None:
            peak = max(peak, anonymous_nbytes(child.pid))
            time.sleep(SAMPLE_SECONDS)
        assert child.stdout is not None
        answer = child.stdout.read()
    if child.returncode != 0:
        raise OutputError(f"measuring {words[0]} failed", found=f"exit code {child.returncode}")
    numbers: Numbers = json.loads(answer)
    return numbers | {"peak_anonymous": peak}


def environment() -> dict[str, str]:
    """Ours, with this package on the path before what the caller has put there."""
    theirs = os.environ.get("PYTHONPATH")
    folders = [str(SCRIPTS), theirs] if theirs else [str(SCRIPTS)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def anonymous_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
