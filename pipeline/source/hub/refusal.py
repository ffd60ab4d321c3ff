"""What an error of the hub client means: a fault that passes, or what the user has to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.errors import SourceError
from pipeline.source.hub.retry import TransferFault
from pipeline.source.json_object import shown

HttpError: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base of the errors of the HTTP library below huggingface_hub: its versions use different ones."""

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529})
_NO_CONNECTION = frozenset({"ConnectError", "ConnectTimeout", "ProxyError"})
_STALLED = frozenset({"ReadTimeout", "PoolTimeout", "WriteTimeout"})
_RESET = re.compile(r"\bt\s*=\s*(\d+)")
_NEXT_LOGIN = "Give a token in HF_TOKEN, or run `hf auth login`"


class UnreachableError(Exception):
    """No connection to the hub at all, or none is wanted (``HF_HUB_OFFLINE``)."""


def explain(error: Exception, where: str, page: str) -> Exception:
    """A `TransferFault`, an `UnreachableError` or a `SourceError` in place of ``error``.

    Args:
        error: What huggingface_hub or its HTTP library raised.
        where: The repository, revision and perhaps file that was asked for.
        page: Address of the repository's page, for the reader of the message.
    """
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError("HF_HUB_OFFLINE is set")
    if isinstance(error, HfHubHTTPError):
        return _explain_answer(error, where, page)
    name = type(error).__name__
    if name in _NO_CONNECTION:
        return UnreachableError(shown(error))
    return TransferFault("no byte came for too long" if name in _STALLED else shown(error) or name)


def status_fault(status: int, headers: Mapping[str, str]) -> TransferFault | None:
    """The fault that an HTTP status stands for if it is one that passes."""
    if status not in _PASSING_STATUS:
        return None
    return TransferFault(f"the server answered {status}", retry_after(headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks us to wait.

    ``Retry-After`` holds seconds or a date (RFC 9110, 10.2.3); the hub's own ``RateLimit`` ends
    in the seconds until the window begins anew: ``"api";r=0;t=55``.
    """
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        until, now = parsedate_to_datetime(asked), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        reset = _RESET.search(headers.get("ratelimit", ""))
        return float(reset[1]) if reset else None


def _explain_answer(error: HfHubHTTPError, where: str, page: str) -> Exception:
    status = error.response.status_code
    fault = status_fault(status, error.response.headers)
    if fault is not None:
        return fault
    what, next_step = _meaning(error, status, page)
    said = f" ({shown(error.server_message)})" if error.server_message else ""
    return SourceError(what, file=where, found=f"answer {status}{said}", next_step=next_step)


def _meaning(error: HfHubHTTPError, status: int, page: str) -> tuple[str, str]:
    """What is wrong, and the next step."""
    if isinstance(error, GatedRepoError):
        return (
            "the repository is gated and this account has no access yet",
            f"Accept its terms on {page} and use a token of that account: {_NEXT_LOGIN}.",
        )
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision", f"Check the spelling, or look on {page}."
    if isinstance(error, RemoteEntryNotFoundError):
        return "the repository has no such file", f"Compare with the list of files on {page}."
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return "the hub asks for a token, or the one that it got has expired", f"{_NEXT_LOGIN}."
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return (
            "the hub knows no such repository, or hides it from this account",
            f"Check the spelling. If it is private: {_NEXT_LOGIN}.",
        )
    if status in (401, 403):
        return (
            "the hub refuses access",
            f"Check that the token may read {page}: {_NEXT_LOGIN}.",
        )
    return "the hub refuses the request", f"Look at {page}, or try again later."
