"""Byte ranges of the files of one snapshot, as the hub serves them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol
from urllib.parse import urlsplit

from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.utils._headers import build_hf_headers

from pipeline.errors import SourceError
from pipeline.source.hub.access import HubAccess
from pipeline.source.hub.refusal import HttpError, UnreachableError, explain, status_fault
from pipeline.source.hub.retry import TransferFault
from pipeline.source.hub.snapshot import HubFile, HubSnapshot
from pipeline.source.json_object import shown

_MAX_REFUSED_LINKS = 2
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Remote(Protocol):
    """Where the bytes of a snapshot's files come from."""

    def where(self, file: HubFile) -> str:
        """The place of ``file``, for messages."""
        ...

    def read_range(
        self, file: HubFile, begin: int, nbytes: int
    ) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes from ``begin`` on, as they arrive: at most ``nbytes``, fewer after a cut.

        Raises:
            TransferFault: Something that may pass, at the start or while bytes arrive.
            RangeIgnored: Whole files only, and ``begin`` is not 0.
            SourceError: Asking again would not help.
        """
        ...


class RangeIgnored(Exception):
    """The server sends whole files only, whatever part is asked for."""


class HubRemote:
    """Reads from a hub, or from the storage that it sends us to. Safe from any thread.

    The link to the storage is asked for once a file and used until it expires; the token goes to
    the hub only.

    Args:
        snapshot: Repository and commit.
        access: How the hub is reached.
    """

    def __init__(self, snapshot: HubSnapshot, access: HubAccess | None = None) -> None:
        self._snapshot = snapshot
        self._access = access or HubAccess()
        self._links: dict[str, str] = {}
        self._asking: dict[str, threading.Lock] = {}
        self._n_refused: dict[str, int] = {}
        self._lock = threading.Lock()

    def where(self, file: HubFile) -> str:
        """Repository, commit and name."""
        return f"{self._snapshot}: {file.name}"

    @contextmanager
    def read_range(self, file: HubFile, begin: int, nbytes: int) -> Iterator[Iterator[bytes]]:
        """See `Remote.read_range`."""
        try:
            url = self._link(file)
            headers = self._headers(url, file) | {"Range": f"bytes={begin}-{begin + nbytes - 1}"}
            with get_session().stream(
                "GET", url, headers=headers, timeout=self._access.timeouts
            ) as response:
                if response.status_code >= 400:
                    meant = self._refused(file, url, response.status_code, response.headers)
                    if meant is not None:
                        raise meant
                    hf_raise_for_status(response)
                _check_part(response.status_code, response.headers, begin, nbytes, file)
                self._n_refused.pop(file.name, None)
                yield _at_most(nbytes, response.iter_raw())
        except (HttpError, OSError) as error:
            raise self._meaning(error, file) from error

    def _link(self, file: HubFile) -> str:
        with self._lock:
            asking = self._asking.setdefault(file.name, threading.Lock())
        with asking:  # one connection asks, the others of the file wait for the answer
            link = self._links.get(file.name)
            if link is None:
                link = self._links[file.name] = self._ask_for_link(file)
            return link

    def _ask_for_link(self, file: HubFile) -> str:
        metadata = self._access.api.get_hf_file_metadata(
            url=self._url(file), timeout=self._access.stall_s
        )
        if metadata.size not in (None, file.nbytes):
            raise SourceError(
                "the file has another size than the hub's own list says",
                file=self.where(file),
                expected=f"{file.nbytes:,} bytes",
                found=f"{metadata.size:,} bytes",
                next_step="Delete the record of the commit and resolve it again.",
            )
        return metadata.location

    def _url(self, file: HubFile) -> str:
        snapshot = self._snapshot
        return hf_hub_url(
            snapshot.repo, file.name, revision=snapshot.commit, endpoint=self._access.endpoint
        )

    def _headers(self, url: str, file: HubFile) -> dict[str, str]:
        # A compressed answer would have other offsets than the file.
        plain = {"Accept-Encoding": "identity"}
        if not _same_origin(url, self._url(file)):
            return plain
        return build_hf_headers(token=self._access.token, library_name="quantmill") | plain

    def _refused(
        self, file: HubFile, url: str, status: int, headers: Mapping[str, str]
    ) -> Exception | None:
        """What a refusal means; None where the hub itself can say it best.

        A link that storage refuses has expired, and the hub gives a new one at the next attempt.
        """
        fault = status_fault(status, headers)
        if fault is not None:
            return fault
        if status == 416:
            return SourceError(
                "the server says that the file ends before the part that was asked for",
                file=self.where(file),
                expected=f"a file of {file.nbytes:,} bytes",
                found=f"answer 416 ({shown(headers.get('content-range', 'no size given'))})",
                next_step="Delete the record of the commit and resolve it again.",
            )
        if _same_origin(url, self._url(file)):
            return None
        if self._count_refused_link(file, url) > _MAX_REFUSED_LINKS:
            return SourceError(
                "the storage refuses every link that the hub gives",
                file=self.where(file),
                found=f"answer {status}",
                next_step="Check the clock of this machine, or try again later.",
            )
        return TransferFault(f"the storage refuses its link (answer {status}); it may be old")

    def _count_refused_link(self, file: HubFile, url: str) -> int:
        """Forget the link; how many have been refused with no good answer between."""
        with self._lock:
            if self._links.get(file.name) == url:  # else another connection has counted it
                del self._links[file.name]
                self._n_refused[file.name] = self._n_refused.get(file.name, 0) + 1
            return self._n_refused.get(file.name, 0)

    def _meaning(self, error: Exception, file: HubFile) -> Exception:
        page = f"{self._access.root}/{self._snapshot.repo}"
        meant = explain(error, self.where(file), page)
        if not isinstance(meant, UnreachableError):
            return meant
        if "HF_HUB_OFFLINE" not in str(meant):
            return TransferFault(f"no connection ({meant})")
        return SourceError(
            "the file is not here, and the hub must not be asked",
            file=self.where(file),
            found=str(meant),
            next_step="Unset HF_HUB_OFFLINE, or put the file in place.",
        )


def _same_origin(one: str, other: str) -> bool:
    return urlsplit(one)[:2] == urlsplit(other)[:2]


def _check_part(
    status: int, headers: Mapping[str, str], begin: int, nbytes: int, file: HubFile
) -> None:
    """Stop unless an answer's body begins at ``begin`` of a file of the right size."""
    if headers.get("content-encoding", "identity") != "identity":
        raise _unusable("compresses what it was asked not to", headers["content-encoding"], file)
    if status == 200:
        if begin:
            raise RangeIgnored
        length = headers.get("content-length", str(file.nbytes))
        if length != str(file.nbytes):
            raise TransferFault(f"the server sends {shown(length)} bytes in place of the file")
        return
    part = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if status != 206 or part is None:
        raise TransferFault(f"the server answered {status} to a request for a part")
    if part[3] not in ("*", str(file.nbytes)):
        raise _unusable("holds a file of another size", part[0], file)
    if int(part[1]) != begin or int(part[2]) >= begin + nbytes:
        raise TransferFault(f"the server sent another part than was asked for ({part[0]})")


def _unusable(does: str, found: str, file: HubFile) -> SourceError:
    return SourceError(
        f"the server {does}",
        file=file.name,
        expected=f"the plain file of {file.nbytes:,} bytes",
        found=shown(found),
        next_step="Check HF_ENDPOINT and proxies; the hub itself serves such files.",
    )


def _at_most(nbytes: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    left = nbytes
    for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            return
