"""How luigi is made to tell the truth and to end its children.

Facts about luigi 3.8 that this answers: it exits 0 on failure unless told otherwise; a task that
writes no output counts as done; SIGTERM to luigi leaves the task processes writing; forking after
torch has run an operation hangs the child.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType

import luigi.configuration
import luigi.parameter
import luigi.task_register

from pipeline.digest import sha256
from pipeline.errors import QuantmillError

EXIT_ORPHANED = 137
"""Exit code of a task process whose luigi is gone; what a shell reports for SIGKILL."""

DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "retcode": {
        "already_running": "10",
        "missing_data": "20",
        "not_run": "25",
        "task_failed": "30",
        "scheduling_error": "35",
        "unhandled_exception": "40",
    },
    "core": {"log_level": "INFO", "no_configure_logging": "false"},
    "resources": {"network": "2"},
    "worker": {
        "check_complete_on_run": "true",
        "force_multiprocessing": "true",
        "keep_alive": "false",
        "task_process_context": "tasks.runtime.ChildGuard",
    },
}
"""luigi settings where the user's own luigi.cfg is silent."""


def apply_defaults() -> None:
    """Set `DEFAULTS`, a local scheduler, forkserver children, and short error messages."""
    config = luigi.configuration.get_config()
    for section, entries in DEFAULTS.items():
        for key, value in entries.items():
            if not config.has_option(section, key):
                config.set(section, key, value)
    if not config.has_option("core", "lock_pid_dir"):
        config.set("core", "lock_pid_dir", str(_lock_folder()))
    if not _names_scheduler(config):
        config.set("core", "local_scheduler", "true")
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("forkserver")
        multiprocessing.set_forkserver_preload(["recipes"])
    shorten_errors()


def shorten_errors() -> None:
    """Show errors raised on purpose without the traceback above them, in this process."""
    for name in ("luigi-interface", "luigi"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _ShortErrors) for known in logger.filters):
            logger.addFilter(_ShortErrors())


def _lock_folder() -> Path:
    """Where luigi notes the commands that run: per user and working folder.

    Its own default is one folder for all: the same words in another folder, where they mean other
    files, would be taken for the same command.
    """
    place = f"{os.getuid()} {Path.cwd()}"
    return Path(tempfile.gettempdir()) / f"luigi-{sha256(place.encode())[:12]}"


def _names_scheduler(config: object) -> bool:
    """Whether the user points at a luigid, on the command line or in a configuration."""
    has_option = config.has_option  # type: ignore[attr-defined]
    configured = any(
        has_option("core", key)
        for key in ("local_scheduler", "default_scheduler_host", "default_scheduler_url")
    )
    return configured or any(word.startswith("--scheduler-") for word in sys.argv)


def end_children_on_sigterm() -> None:
    """Make SIGTERM to luigi end its task processes too, as Ctrl-C does, and say so in a line."""
    if multiprocessing.parent_process() is None and threading.current_thread() is (
        threading.main_thread()
    ):
        signal.signal(signal.SIGTERM, _interrupt)
        sys.excepthook = _tell_interrupt


def _tell_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped; the same command goes on where this one ended\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.default_int_handler(number, frame)


class ChildGuard:
    """Task processes die with their luigi, even if that was killed by SIGKILL."""

    def __init__(self, task_process: object) -> None:
        del task_process

    def __enter__(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is None:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        shorten_errors()

        def leave_with_parent() -> None:
            parent.join()
            os._exit(EXIT_ORPHANED)

        threading.Thread(target=leave_with_parent, daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


PLAIN_ERRORS = (
    luigi.parameter.ParameterException,
    luigi.task_register.TaskClassException,
    OSError,
)
"""Errors of luigi and of the system whose own words say enough."""

_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n.*?^(?:pipeline\.errors\.\w+|\w*Error): (.*)",
    re.DOTALL | re.MULTILINE,
)


_CAUSES = re.compile(
    r"Traceback \(most recent call last\):\n(?:(?!Traceback \().)*?\n"
    r"(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n",
    re.DOTALL,
)
"""What led to the error that is told."""

_KNOWN = re.compile(r"^(pipeline\.errors\.\w+|PermissionError|NotADirectoryError): ", re.MULTILINE)


class _ShortErrors(logging.Filter):
    """Errors raised on purpose say what to do; a traceback above them only hides it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, QuantmillError):
            notes = getattr(error, "__notes__", [])
            record.msg = "\n".join([record.getMessage(), str(error), *notes])
            record.args, record.exc_info, record.exc_text = None, None, None
            return True
        if isinstance(error, PLAIN_ERRORS):
            record.msg = f"{record.getMessage()}\n{error}"
            record.args, record.exc_info, record.exc_text = None, None, None
            return True
        message = record.getMessage()
        if "Traceback (" in message and _KNOWN.search(message):
            record.msg, record.args = _TRACEBACK.sub(r"\1", _CAUSES.sub("", message)), None
        return True
