"""What the tests of the hub client share: a served repository, and time that does not pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from huggingface_hub import constants
from huggingface_hub.utils import close_session

from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.events import FetchEvents
from pipeline.source.hub.fetch import FetchHabits, fetch_file
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.resolve import resolve
from pipeline.source.hub.retry import Clock, Patience
from tests.hub_server import HubServer

REPO = "owner/model"
MAIN = HubAddress(REPO, "main")
SHARD = "model-00001-of-00001.safetensors"
PIECE = 64 << 10
N_PIECES = 10
CONTENT = random.Random(7).randbytes(PIECE * N_PIECES - 1000)
FILES = {
    "config.json": b'{"model_type": "tiny"}\n',
    SHARD: CONTENT,
    "folder/ein Name.bin": b"x" * 9,
}


class Timeless:
    """A clock whose waits are written down and take no time."""

    def __init__(self):
        self.time = 0.0
        self.waits = []

    def wait(self, seconds, stopped):
        self.waits.append(seconds)
        self.time += seconds

    @property
    def clock(self):
        return Clock(now=lambda: self.time, wait=self.wait, jitter=lambda: 0.0)


class Told:
    """Everything a download told."""

    def __init__(self):
        self.nbytes, self.notes = [], []
        self.events = FetchEvents(advanced=self.nbytes.append, noted=self.notes.append)

    @property
    def total(self):
        return sum(self.nbytes)


def habits(timeless, **changed):
    usual = FetchHabits(piece_nbytes=PIECE, patience=Patience(n_retries=3), clock=timeless.clock)
    return replace(usual, **changed)


@contextmanager
def served(root: Path, **settings) -> Iterator[HubServer]:
    """`FILES` as ``main`` of `REPO`; the user's own cache, settings and proxies stay out of it."""
    folder = root / "served"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    close_session()
    hidden = {"HF_HUB_CACHE": str(root / "hub cache"), "HF_HUB_OFFLINE": False}
    with (
        patch.multiple(constants, **hidden),
        patch.dict("os.environ", {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}),
        HubServer(**settings) as server,
    ):
        server.add_commit(REPO, folder, commit="a" * 40)
        yield server
    close_session()


def access_to(hub, *, token=None, stall_s=5.0):
    return HubAccess(hub.url, token=token, stall_s=stall_s)


def snapshot_of(hub, root: Path, **settings):
    return resolve(MAIN, pinned=root / "pin.json", access=access_to(hub, **settings))[0]


def ranges_asked(hub, file=SHARD):
    """(first, end) of every range of ``file`` that was asked for, in order of arrival."""
    spans = [
        one.range.removeprefix("bytes=").split("-")
        for one in hub.requests
        if one.file == file and one.range
    ]
    return [(int(first), int(last) + 1) for first, last in spans]


def fetch(hub, tmp_path, target, *, name=SHARD, told=None, timeless=None, stall_s=5.0, **options):
    snapshot = snapshot_of(hub, tmp_path, stall_s=stall_s)
    remote = HubRemote(snapshot, access_to(hub, stall_s=stall_s))
    options = {"habits": habits(timeless or Timeless())} | options
    fetch_file(remote, snapshot.file(name), target, events=(told or Told()).events, **options)


def left(target):
    return sorted(path.name for path in target.parent.iterdir() if not path.name.startswith("."))
