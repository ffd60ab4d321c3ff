"""A download that is killed outright goes on where it was."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.remote import HubRemote
from tests.hub_server import Fault, Stall
from tests.pipeline.hub_side import (
    CONTENT,
    PIECE,
    SHARD,
    Timeless,
    access_to,
    habits,
    ranges_asked,
    snapshot_of,
)

CHILD = f"""
import sys
from pathlib import Path
from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.address import parse_address
from pipeline.source.hub.fetch import FetchHabits, fetch_file
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.resolve import resolve

address, pinned, target = sys.argv[1:]
snapshot, _ = resolve(parse_address(address), pinned=Path(pinned))
habits = FetchHabits(piece_nbytes={PIECE})
file = snapshot.file({SHARD!r})
fetch_file(HubRemote(snapshot), file, Path(target), n_connections=2, habits=habits)
"""


def finished(journal: Path) -> set[int]:
    import json

    lines = journal.read_bytes().splitlines()[1:] if journal.exists() else []
    return {json.loads(line)["offset"] for line in lines}


def kill_once_finished(child, journal, n_pieces):
    deadline = time.monotonic() + 120
    try:
        while len(finished(journal)) < n_pieces and time.monotonic() < deadline:
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def test_a_killed_download_goes_on_where_it_was(hub, tmp_path):
    target = tmp_path / "ein Ordner" / "Gewichte 1.safetensors"
    for position in (3 * PIECE + 5, 7 * PIECE + 5):
        hub.fault(Fault(Stall(seconds=60), SHARD, position=position, times=None))
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "owner/model", str(tmp_path / "pin.json"), str(target)],
        env=hub.client_environment(tmp_path / "home"),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    journal = target.with_name(f"{target.name}.journal")
    kill_once_finished(child, journal, 6)
    assert not target.exists()
    kept = finished(journal)
    assert kept == {number * PIECE for number in (0, 1, 2, 4, 5, 6)}
    hub.clear_faults()
    hub.log.clear()
    snapshot = snapshot_of(hub, tmp_path)
    remote = HubRemote(snapshot, access_to(hub))
    fetch_file(remote, snapshot.file(SHARD), target, habits=habits(Timeless()))
    assert target.read_bytes() == CONTENT
    assert not kept & {first for first, _ in ranges_asked(hub)}
    assert sorted(ranges_asked(hub))[0] == (3 * PIECE, 4 * PIECE)
