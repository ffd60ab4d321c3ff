"""Runs of the main job from a hub on loopback, and what they asked for and left behind."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import psutil

from pipeline.source.hub.headers import _FIRST_NBYTES
from tests.tasks.commands import command

REPO = "owner/model"
ADDRESS = f"{REPO}@main"
OUTPUT = "out/mini-native-mainline"
ENGRAM = ("model-00013-of-00014.safetensors", "model-00014-of-00014.safetensors")
"""Shards that hold nothing but an engram layer's table and projections."""


def words(*more, source=ADDRESS):
    return ("RunRecipe", "--source", source, "--recipe", "native", "--name", "mini", *more)


def environment(hub, cwd, **more):
    """That of a person who has set nothing up but the hub's address."""
    return hub.client_environment(cwd / "home") | more


def hub_run(hub, cwd, *more, source=ADDRESS, **settings):
    return subprocess.run(
        command("--workers", 3, *words(*more, source=source)),
        cwd=cwd,
        env=environment(hub, cwd, **settings),
        capture_output=True,
        text=True,
        timeout=300,
    )


def big_requests(hub, file=None):
    """Requests for more of a shard than its header, whatever became of them."""
    return [one for one in hub.requests if _is_big(one) and file in (None, one.file)]


def _is_big(request):
    if not request.file.endswith(".safetensors") or request.range is None:
        return False
    first, last = map(int, request.range.removeprefix("bytes=").split("-"))
    return first > 0 or last >= _FIRST_NBYTES


def files_asked(hub):
    return {one.file for one in big_requests(hub)}


def shard_digests(cwd):
    """Name -> sha256 of every shard, by its bytes."""
    paths = (cwd / OUTPUT).glob("*.gguf")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def listed_digests(cwd):
    """Name -> sha256 of every shard, as SHA256SUMS lists them."""
    lines = (cwd / OUTPUT / "SHA256SUMS").read_text().splitlines()
    pairs = (line.split("  ") for line in lines)
    return {name: digest for digest, name in pairs if name.endswith(".gguf")}


def sources_left(cwd):
    """Files of the checkpoint that were fetched and lie below ``out``, finished or not."""
    return sorted(path.name for path in cwd.glob("out/.quantmill/sources/*/files/[!.]*"))


def kill_once(hub, cwd, *more, ready, after_s=0.0):
    """Start a run, kill its whole session with SIGKILL ``after_s`` after ``ready(stdout)``.

    Returns what it had written to stdout.
    """
    told = cwd / "told"
    with told.open("w") as out:
        run = subprocess.Popen(
            command("--workers", 3, *words(*more)),
            cwd=cwd,
            env=environment(hub, cwd),
            start_new_session=True,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + 60
        while not ready(told.read_text()) and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(after_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=60)
    psutil.wait_procs(session(run.pid), timeout=60)
    assert session(run.pid) == []
    return told.read_text()


def session(leader):
    """Processes of a session that still run."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == leader and process.info["status"] != "zombie":
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def weight_map(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def needed(folder):
    """Shards with tensors that target and draft carry: all but vision."""
    left_out = ("vision.", "aligner.")
    return {file for name, file in weight_map(folder).items() if not name.startswith(left_out)}


def without(folder, names, target):
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*names))
    return target


def succeeded(result):
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def refused(result, cwd, *sentences):
    """One clear message, the scheduling code, and nothing under a final name."""
    assert result.returncode == 35, result.stdout + result.stderr
    for sentence in sentences:
        assert result.stderr.count(sentence) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert not (cwd / OUTPUT).exists()
    assert not list(cwd.rglob("*.gguf"))
    assert sources_left(cwd) == []
