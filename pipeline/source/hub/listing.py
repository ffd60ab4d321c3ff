"""What the hub says about an address: its commit, and every file with size and digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from huggingface_hub import ModelInfo
from huggingface_hub.hf_api import RepoSibling

from pipeline.errors import SourceError
from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.refusal import HttpError, explain
from pipeline.source.hub.retry import Attempts, TransferFault
from pipeline.source.hub.snapshot import HubFile, HubSnapshot, checked_commit, checked_file
from pipeline.source.json_object import shown

Answer = TypeVar("Answer")

_LOOK_S = 10.0
"""How long a mere look at a branch may take."""


def list_snapshot(address: HubAddress, access: HubAccess, attempts: Attempts) -> HubSnapshot:
    """The snapshot that ``address`` stands for now.

    Raises:
        SourceError: The hub refuses, has no such repository or revision, or talks nonsense.
        UnreachableError: No connection to the hub.
    """

    def ask() -> ModelInfo:
        return access.api.model_info(
            address.repo,
            revision=address.revision,
            files_metadata=True,
            timeout=access.stall_s,
        )

    info = _ask(ask, address, access, attempts)
    where = str(address)
    listed = [_file(sibling, where) for sibling in info.siblings or ()]
    return HubSnapshot(
        address.repo,
        checked_commit(info.sha, where),
        address.revision,
        {file.name: file for file in sorted(listed, key=lambda file: file.name)},
    )


def current_commit(address: HubAddress, access: HubAccess, attempts: Attempts) -> str:
    """The commit that ``address`` stands for now.

    Raises:
        SourceError: As `list_snapshot`.
        UnreachableError: No connection to the hub.
    """

    def ask() -> ModelInfo:
        return access.api.model_info(
            address.repo, revision=address.revision, timeout=min(_LOOK_S, access.stall_s)
        )

    return checked_commit(_ask(ask, address, access, attempts).sha, str(address))


def _ask(
    ask: Callable[[], Answer], address: HubAddress, access: HubAccess, attempts: Attempts
) -> Answer:
    while True:
        try:
            return ask()
        except (HttpError, OSError) as error:
            meant = explain(error, str(address), f"{access.root}/{address.repo}")
            if not isinstance(meant, TransferFault):
                raise meant from error
            attempts.failed(meant)
        except (ValueError, TypeError, KeyError) as error:
            raise SourceError(
                "the answer is not that of a model hub",
                file=f"{access.root}/{address.repo}",
                found=shown(error),
                next_step="Check HF_ENDPOINT, and that no login page stands before the network.",
            ) from error


def _file(sibling: RepoSibling, where: str) -> HubFile:
    sha256 = None if sibling.lfs is None else sibling.lfs.sha256
    return checked_file(sibling.rfilename, sibling.size, sha256, sibling.blob_id, where=where)
