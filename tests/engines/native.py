"""A native llama.cpp of an earlier build, which knows V4 but not V4.1, through ctypes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.engines.engine import Session
from tests.engines.process import Process, ProcessSession, paths

SCRIPT = Path(__file__).with_name("native_child.py")


class Native:
    """Reads V4's files and its draft. Every session is a process, since the engine may abort.

    F32 caches (the draft's too), no flash attention, one thread: exact and the same every time.
    """

    architectures = frozenset({"deepseek4", "dflash"})

    def __init__(self, packages: Path, build: str) -> None:
        self.name = f"llama.cpp {build} (native)"
        self._command = (sys.executable, str(SCRIPT), str(packages))

    def load(
        self, files: Sequence[Path], *, draft: Path | None = None, n_ctx: int = 512
    ) -> Session:
        return self._load(files, n_ctx=n_ctx, draft=draft and paths([draft])[0])

    def load_vocabulary(self, files: Sequence[Path]) -> Session:
        """A session that can do nothing but tokenize; the files need no tensors."""
        return self._load(files, n_ctx=0, vocab_only=True)

    def load_headers(self, files: Sequence[Path]) -> Session:
        """A session without content: names, shapes, types and counts are what the engine wants.

        The files need their full length but no data, so sparse files of any size will do.
        """
        return self._load(files, n_ctx=0, no_alloc=True)

    def _load(self, files: Sequence[Path], **how: object) -> Session:
        process = Process(self._command, GGML_NO_BACKTRACE="1")  # else an abort starts a debugger
        try:
            loaded = process.ask("load", files=paths(files), **how)
        except BaseException:
            process.close()
            raise
        return ProcessSession(process, loaded, owns=True)
