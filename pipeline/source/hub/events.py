"""What a download tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchEvents:
    """Told from several threads at once."""

    advanced: Callable[[int], None] = lambda _: None
    """Bytes of the file that are here now, kept ones too; negative when some are thrown away."""
    hashed: Callable[[int], None] = lambda _: None
    """Bytes read back for the digest."""
    noted: Callable[[str], None] = lambda _: None
    """One sentence on something that went wrong and is being dealt with."""


QUIET = FetchEvents()
