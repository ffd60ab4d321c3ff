"""The whole job in this process, from checkpoint to manifest, through luigi's own worker.

Used by the tests of promises and by the processes that they start and kill.
"""

import itertools
import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import luigi
import luigi.configuration
from luigi.task_register import Register

from pipeline import files
from pipeline.digest import spec_digest
from pipeline.errors import Problems
from pipeline.store import ShardStore
from recipes import RunRecipe
from tasks.job import open_job
from tasks.parameters import JobTask
from tests.pipeline.filling import CHILDREN, sha256_of

CHILDREN.set_forkserver_preload(["tests.promises.whole_job"])

NAME = "mini-native-mainline"
"""The folder that the native recipe makes."""

WRITING_SEAMS = (
    "_pwrite",
    "_write",
    "_fdatasync",
    "_fsync",
    "_replace",
    "_fallocate",
    "_truncate",
    "_link",
)
"""Every call of `pipeline.files` that changes a disk."""

_heard: list[Exception] = []


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and what it raised on the way."""

    ok: bool
    errors: tuple[Exception, ...]

    @property
    def problems(self):
        """Every error, those found in one pass one by one."""
        return [p for e in self.errors for p in (e.problems if isinstance(e, Problems) else [e])]

    @property
    def text(self):
        return "\n".join(map(str, self.errors))


@JobTask.event_handler(luigi.Event.FAILURE)
@JobTask.event_handler(luigi.Event.BROKEN_TASK)
def hear(task, error):
    del task
    _heard.append(error)


def run_job(source, out, recipe="native", **parameters):
    """What ``luigi RunRecipe`` does, but for the processes around it."""
    given = {"name": "mini", "threads": 2} | parameters
    _heard.clear()
    open_job.cache_clear()
    Register.clear_instance_cache()
    task = RunRecipe(source=str(source), out=str(out), recipe=str(recipe), **given)
    with _in_this_process():
        result = luigi.build([task], local_scheduler=True, detailed_summary=True)
    ok = result.status is luigi.LuigiStatusCode.SUCCESS
    if not ok and not _heard:
        _ask_again(task)
    return Outcome(ok, tuple(_heard))


def _ask_again(task):
    """What keeps a job from being planned; luigi leaves that to its log."""
    try:
        task.complete()
        list(task.requires())
    except Exception as error:
        _heard.append(error)


@contextmanager
def _in_this_process():
    config = luigi.configuration.get_config()
    config.set("worker", "force_multiprocessing", "false")
    config.set("core", "log_level", "CRITICAL")
    try:
        yield
    finally:
        config.set("worker", "force_multiprocessing", "true")
        config.set("core", "log_level", "INFO")


def one_life(source, out, death=None, until=None, **parameters):
    """The job in a process of its own.

    ``death`` is an `Nth` that ends the process; after a few blocks it waits until the file
    ``until`` is there.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    if death:
        death.install()
    if until:
        ShardStore.note = waiting(until)
    os._exit(0 if run_job(source, out, **parameters).ok else 1)


def waiting(until, n_blocks=3):
    """A listener that holds up every block but the first ones until the file is there."""
    begun = itertools.count()

    def note(*_):
        if next(begun) >= n_blocks:
            while not until.exists():
                time.sleep(0.01)

    return note


def is_unfinished(path):
    """Whether a name says itself that its file is not whole."""
    return path.name.endswith((".part", ".journal", ".link")) or path.name == "now"


def finals(out):
    """sha256 of every file under a final name, by its path below ``out``."""
    return {
        path.relative_to(out).as_posix(): content_sha256(path)
        for path in sorted(Path(out).rglob("*"))
        if path.is_file() and not is_unfinished(path)
    }


def content_sha256(path):
    """Digest of a file; of a shard's record, without when the shard was written."""
    if path.name != "record.json":
        return sha256_of(path)
    record = json.loads(path.read_text())
    record.pop("modified_ns", None)
    return spec_digest(record)


def assert_only_whole_files(out, wanted):
    """What stands under a final name is what an undisturbed run puts there; manifest last."""
    found = finals(out)
    for name, digest in found.items():
        folder, _, file = name.rpartition("/")
        shown = f"{NAME}/{file}" if folder.startswith(".quantmill/naming-") else name
        assert digest == wanted[shown], f"{name} is not what it should be"
    if f"{NAME}/manifest.json" in found:
        assert set(wanted) <= set(found)


def assert_right(out, wanted):
    """Exactly the files of an undisturbed run, byte for byte, and nothing unfinished.

    A run that ends between the naming of a shard and its tidying leaves a few kilobytes of notes.
    """
    assert finals(out) == wanted
    left = {path.name for path in Path(out).rglob("*") if is_unfinished(path)}
    assert left <= {"shard.gguf.journal", "now"}


def linked_copy(source, folder, *, but=()):
    """A checkpoint whose files are those of ``source``; the ones in ``but`` are real copies."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name in but:
            shutil.copy2(path, folder / path.name)
        else:
            (folder / path.name).hardlink_to(path)
    return folder


def installed(seams, monkeypatch, make):
    """Put ``make(seam, real call)`` in the place of each call of `pipeline.files`."""
    for seam in seams:
        monkeypatch.setattr(files, seam, make(seam, getattr(files, seam)))


def say(sentence):
    """Leave word in the captured output: what to repeat when a test with chances fails."""
    sys.stdout.write(f"{sentence}\n")
