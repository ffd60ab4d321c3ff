"""An engine's process: one JSON object a line in, one a line out."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.engines.engine import EngineDied, Generation, Refused

DEADLINE_S = 120.0
"""Longer than anything asked here takes, on a machine that does other things as well."""

_N_LAST_LINES = 12


class Process:
    """A process that answers requests one by one, each within a deadline.

    Answers are ``{"ok": value}``, ``{"refused": lines}``, ``{"died": lines}`` or, of a request that
    makes no sense, ``{"wrong": sentence}``.
    """

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def ask(self, op: str, *, deadline_s: float = DEADLINE_S, **fields: object):
        """The answer to one request.

        Raises:
            Refused: The engine refused.
            EngineDied: It aborted, or did not answer within the deadline and was killed.
            ValueError: The request makes no sense.
        """
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        late = threading.Timer(deadline_s, self._process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line)
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            late.cancel()
        if not answer.endswith(b"\n"):
            raise EngineDied(self._last_words(op, deadline_s))
        return _value(json.loads(answer))

    def _last_words(self, op: str, deadline_s: float) -> list[str]:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()[-_N_LAST_LINES:]
        return [*lines, f"the engine's process ended with {code} at {op} (deadline {deadline_s} s)"]

    def close(self) -> None:
        """End the process; again is harmless."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def _value(answer):
    match answer:
        case {"ok": value}:
            return value
        case {"refused": lines}:
            raise Refused(lines)
        case {"died": lines}:
            raise EngineDied(lines)
        case {"wrong": sentence}:
            raise ValueError(sentence)
    raise AssertionError(answer)


class ProcessSession:
    """A model that a `Process` has loaded."""

    def __init__(self, process: Process, loaded: Mapping[str, int], *, owns: bool) -> None:
        """``owns`` says that the process has no other session and ends with this one."""
        self._process, self._owns = process, owns
        self._session = loaded["session"]
        self.n_vocab, self.n_params = loaded["n_vocab"], loaded["n_params"]
        self.nbytes = loaded["nbytes"]

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        return self._ask("tokenize", text=text, special=special)

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        sent = self._ask("logits", tokens=[int(token) for token in tokens])
        logits = np.frombuffer(base64.b64decode(sent), "<f4").reshape(-1, self.n_vocab)
        return log_softmax(logits.astype(np.float64))

    def generate(self, tokens: Sequence[int], n: int) -> Generation:
        made = self._ask("generate", tokens=[int(token) for token in tokens], n=n)
        return Generation(tuple(made["tokens"]), made["n_drafted"], made["n_accepted"])

    def close(self) -> None:
        if self._owns:
            self._process.close()
        elif self._process.is_alive:
            self._ask("close")

    def _ask(self, op: str, **fields: object):
        return self._process.ask(op, session=self._session, **fields)

    def __enter__(self) -> ProcessSession:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row less the logarithm of the sum of its exponentials."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def paths(files: Sequence[Path]) -> list[str]:
    """Absolute names: the process may have been started elsewhere."""
    return [str(file.absolute()) for file in files]
