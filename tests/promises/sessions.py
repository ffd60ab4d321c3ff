"""luigi sessions that tests start, watch and kill: each in a session of its own."""

import os
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.tasks.commands import LUIGI, command


def begin(*words, cwd, **environment):
    """A luigi process in a new session; what it says goes to ``<cwd>/session.log``."""
    return _begin(command(*words), cwd, environment)


def _begin(words, cwd, environment):
    with (cwd / "session.log").open("ab") as log:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **environment},
            start_new_session=True,
            stdout=log,
            stderr=log,
            preexec_fn=_hear_interrupts,
        )


def _hear_interrupts():
    """A suite that runs in the background has SIGINT ignored, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(session):
    """Processes of a session that still run; ended ones that nobody has reaped do not."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != "zombie":
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def end_all(*sessions):
    """Kill whatever is left of sessions; for the end of a test."""
    for session in sessions:
        for pid in alive(session.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        session.wait()


def wait_until(holds, seconds=60):
    """Whether ``holds()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.02)
    return bool(holds())


def log_of(cwd):
    path = cwd / "session.log"
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def scheduler(folder, **settings):
    """A luigid on a free loopback port, with its state in ``folder``; gives the port."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = "".join(f"{key}={value}\n" for key, value in settings.items())
    (folder / "luigi.cfg").write_text(f"[scheduler]\nstate_path={folder / 'state'}\n{lines}")
    luigid = Path(LUIGI).with_name("luigid")
    words = [str(luigid), "--address", "127.0.0.1", "--port", str(port)]
    process = _begin(words, folder, {"LUIGI_CONFIG_PATH": str(folder / "luigi.cfg")})
    try:
        assert wait_until(lambda: answers(port)), log_of(folder)
        yield port
    finally:
        end_all(process)


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def machine(folder, temporary, port, *words):
    """A luigi worker with a folder, temporary files and locks of its own, as on another host."""
    folder.mkdir()
    temporary.mkdir()
    (folder / "luigi.cfg").write_text(
        "[worker]\nkeep_alive=true\nwait_interval=0.5\nwait_jitter=0.1\nping_interval=0.5\n"
    )
    where = ("--scheduler-host", "127.0.0.1", "--scheduler-port", port)
    locks = ("--lock-pid-dir", folder / "locks")
    return begin(*words, *where, *locks, cwd=folder, TMPDIR=str(temporary))
