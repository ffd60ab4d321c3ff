"""From an address to one commit: resolved once, recorded, and kept even when the branch moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.cache import cached_snapshot
from pipeline.source.hub.listing import current_commit, list_snapshot
from pipeline.source.hub.pin import read_pin, write_pin
from pipeline.source.hub.refusal import UnreachableError
from pipeline.source.hub.retry import CLOCK, Attempts, Clock, Patience
from pipeline.source.hub.snapshot import HubSnapshot

_FIRST = Patience(n_retries=6, most_asked_s=600)
_AGAIN = Patience(n_retries=0)
"""A recorded commit is enough to work with: the look at the branch is not waited for."""


def resolve(
    address: HubAddress,
    *,
    pinned: Path,
    access: HubAccess | None = None,
    looks: bool = True,
    clock: Clock = CLOCK,
    noted: Callable[[str], None] = lambda _: None,
) -> tuple[HubSnapshot, str | None]:
    """The snapshot to work with, and one sentence if there is something to tell about it.

    The first run asks the hub and records commit and files in ``pinned``; later runs work with
    that commit and say when the branch has moved since. Without a connection the record is used,
    else a copy in the user's hub cache.

    Args:
        address: What to resolve.
        pinned: Where the record of this address lies or is to lie.
        access: How the hub is reached.
        looks: Whether to ask where a recorded branch stands by now.
        clock: Time, for the waits between attempts.
        noted: Told of each wait in one sentence.

    Raises:
        SourceError: The hub refuses or has no such thing, or there is neither connection nor copy.
        OutputError: The record cannot be written.
    """
    access = access or HubAccess()
    recorded = read_pin(pinned, address)
    if recorded is not None:
        return recorded, _moved(recorded, address, pinned, access) if looks else None
    try:
        attempts = Attempts(str(address), _FIRST, clock=clock, noted=noted)
        snapshot = list_snapshot(address, access, attempts)
    except UnreachableError as error:
        return _from_cache(address, access, error)
    write_pin(pinned, snapshot)
    return snapshot, None


def _moved(
    recorded: HubSnapshot, address: HubAddress, pinned: Path, access: HubAccess
) -> str | None:
    if address.is_commit:
        return None
    try:
        commit = current_commit(address, access, Attempts(str(address), _AGAIN))
    except UnreachableError:
        return None
    except SourceError as error:
        return f"Cannot see whether {address} has moved since it was recorded: {error}"
    if commit == recorded.commit:
        return None
    return (
        f"{address} has moved to {commit} since {recorded.commit} was recorded; the recorded "
        f"commit is used (delete {pinned} to take the new one)."
    )


def _from_cache(
    address: HubAddress, access: HubAccess, reason: UnreachableError
) -> tuple[HubSnapshot, str | None]:
    snapshot = cached_snapshot(address)
    if snapshot is None:
        raise SourceError(
            "the hub cannot be reached, and no copy of the repository is here",
            file=str(address),
            found=f"{access.root}: {reason}",
            next_step="Check the network (and HF_ENDPOINT, HF_HUB_OFFLINE), "
            "or name a folder that holds the checkpoint.",
        ) from reason
    note = f"The hub cannot be reached ({reason}); {snapshot} from the local hub cache is used."
    return snapshot, note
