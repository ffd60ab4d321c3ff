"""P13: several processes, and several machines, on one output."""

import os
import re
import signal

import pytest

import tasks.output
import tasks.shard
from pipeline.gguf.part import ShardPart
from pipeline.store import ShardStore
from tests.pipeline.filling import CHILDREN
from tests.promises.sessions import (
    alive,
    begin,
    end_all,
    log_of,
    machine,
    scheduler,
    wait_until,
)
from tests.promises.whole_job import (
    assert_only_whole_files,
    assert_right,
    one_life,
    run_job,
    say,
)
from tests.tasks.commands import luigi, run_recipe

DONE, ALREADY_RUNNING, NOT_RUN = 0, 10, 25
OTHERS_DID_IT = {DONE, ALREADY_RUNNING, NOT_RUN}
"""Exit codes of a machine whose work another did or is doing: only 0 says that all is whole."""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 1.5])
def test_p13_two_sessions_on_one_output_do_no_harm(small_miniature, tmp_path, wanted, delay):
    """Not the same command line, so luigi's own lock does not keep them apart."""
    out = tmp_path / "out"
    folders = [tmp_path / "a", tmp_path / "b"]
    sessions = []
    try:
        for n_threads, folder in enumerate(folders, 1):
            folder.mkdir()
            words = run_recipe(small_miniature, "native", "--out", out, "--threads", n_threads)
            sessions.append(begin(*words, cwd=folder))
            wait_until(lambda: False, delay)
        for session, folder in zip(sessions, folders, strict=True):
            assert session.wait(300) == DONE, log_of(folder)
    finally:
        end_all(*sessions)
    assert_right(out, wanted)


MOMENTS = {
    "at its first block": (ShardStore, "note"),
    "once all blocks are written": (ShardPart, "read_back"),
    "before errors are measured": (tasks.shard, "measure_errors"),
    "before the record": (ShardStore, "save"),
    "before the shard is named": (ShardPart, "publish"),
    "before the output is named": (tasks.output, "verify_files"),
    "before the documents": (tasks.output, "write_documents"),
}
"""Where this process stands when another finishes the same job."""

FAST = ("before the shard is named",)


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        pytest.param(*moment, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, moment in MOMENTS.items()
    ],
)
def test_p13_another_process_may_finish_the_job_at_any_step(
    small_miniature, tmp_path, wanted, monkeypatch, owner, step
):
    """As on two machines, when one was taken for dead and its shard was given to the other."""
    out, real, seen = tmp_path / "out", getattr(owner, step), []

    def after_the_other(*arguments, **options):
        if not seen:
            seen.append(step)
            other = CHILDREN.Process(target=one_life, args=(small_miniature, out))
            other.start()
            other.join()
            assert other.exitcode == 0
            assert_only_whole_files(out, wanted)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, step, after_the_other)
    outcome = run_job(small_miniature, out)
    assert seen
    assert_only_whole_files(out, wanted)
    assert outcome.ok, outcome.text
    assert_right(out, wanted)


def test_p13_a_slow_process_may_still_write_what_another_has_finished(
    small_miniature, tmp_path, wanted
):
    """Both fill the same shard; the slow one goes on with it long after it has got its name."""
    out, signal_to_go = tmp_path / "out", tmp_path / "go"
    options = {"until": signal_to_go}
    slow = CHILDREN.Process(target=one_life, args=(small_miniature, out), kwargs=options)
    slow.start()
    try:
        assert wait_until(lambda: list(out.glob(".quantmill/*/shard.gguf.part")))
        outcome = run_job(small_miniature, out)
        assert slow.is_alive()
        assert_only_whole_files(out, wanted)
        signal_to_go.touch()
        slow.join(300)
        assert slow.exitcode == 0
    finally:
        slow.kill()
        slow.join()
    assert_right(out, wanted)
    assert outcome.ok, outcome.text


@pytest.mark.slow
def test_p13_the_same_command_twice_at_once_is_told(
    small_miniature, tmp_path, short_folder, wanted
):
    first = begin(*run_recipe(small_miniature), cwd=tmp_path, TMPDIR=str(short_folder))
    try:
        assert wait_until(lambda: list(short_folder.glob("luigi-*/*")))
        second = luigi(*run_recipe(small_miniature), cwd=tmp_path, TMPDIR=str(short_folder))
        assert second.returncode == ALREADY_RUNNING, second.stderr
        assert first.wait(300) == DONE
    finally:
        end_all(first)
    assert_right(tmp_path / "out", wanted)


QUICK_TO_NOTICE = {"worker_disconnect_delay": 4, "retry_delay": 1, "prune_on_get_work": "true"}
"""luigid's own: 60 s of silence, 900 s until a failed task is tried again, looked at every 60 s."""


def n_made(folder):
    """Shards that a session says it made."""
    return len(re.findall(r"task   WriteShard\S+   has status   DONE", log_of(folder)))


@pytest.mark.slow
def test_p13_two_machines_share_the_shards(small_miniature, tmp_path, short_folder, wanted):
    out = tmp_path / "out"
    words = run_recipe(small_miniature, "native", "--out", out, "--threads", 1)
    folders = [tmp_path / "a", tmp_path / "b"]
    sessions = []
    with scheduler(tmp_path / "scheduler") as port:
        try:
            for folder in folders:
                sessions.append(machine(folder, short_folder / folder.name, port, *words))
            codes = [session.wait(300) for session in sessions]
        finally:
            end_all(*sessions)
    say(f"exit codes {codes}, shards {[n_made(f) for f in folders]}")
    assert set(codes) <= OTHERS_DID_IT, [log_of(folder) for folder in folders]
    assert sum(map(n_made, folders)) == 5
    assert_right(out, wanted)
    check_nothing_is_left_to_do(words, tmp_path)


def check_nothing_is_left_to_do(words, cwd):
    """What a person does at the end: the same command without the scheduler."""
    last = luigi(*words, "--local-scheduler", cwd=cwd)
    assert last.returncode == DONE, last.stderr
    assert "nothing to do" in last.stdout


@pytest.mark.slow
def test_p13_a_machine_that_dies_is_replaced_by_another(
    small_miniature, tmp_path, short_folder, wanted
):
    """One of two is killed with all its processes while it makes a shard."""
    out = tmp_path / "out"
    words = run_recipe(small_miniature, "native", "--out", out, "--threads", 1)
    sessions = []
    with scheduler(tmp_path / "scheduler", **QUICK_TO_NOTICE) as port:
        try:
            dying = machine(tmp_path / "dying", short_folder / "dying", port, *words)
            sessions.append(dying)
            assert wait_until(lambda: list(out.glob(".quantmill/*/shard.gguf.part")))
            living = machine(tmp_path / "living", short_folder / "living", port, *words)
            sessions.append(living)
            wait_until(lambda: False, 0.8)
            os.killpg(dying.pid, signal.SIGKILL)
            assert dying.wait(60) == -signal.SIGKILL
            assert wait_until(lambda: alive(dying.pid) == [])
            assert_only_whole_files(out, wanted)
            code = living.wait(300)
        finally:
            end_all(*sessions)
    say(f"exit code {code}")
    assert code in OTHERS_DID_IT, log_of(tmp_path / "living")
    assert_right(out, wanted)
    check_nothing_is_left_to_do(words, tmp_path)
