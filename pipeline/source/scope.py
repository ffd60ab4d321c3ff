"""Which tensors of a checkpoint count: all of them, or those of one module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scope:
    """What is looked at and what may be absent, told by how tensor names begin.

    ``only``: names that begin so, and no others; empty for all. ``optional``: names that begin so
    may be absent, all of them together; empty for none.
    """

    only: str = ""
    optional: str = ""

    def covers(self, name: str) -> bool:
        """Whether the tensor of this name is looked at."""
        return name.startswith(self.only)

    def may_lack(self, name: str) -> bool:
        """Whether the tensor of this name may be absent, with the rest of its module."""
        return bool(self.optional) and name.startswith(self.optional)


WHOLE = Scope()
"""Every tensor, none of which may be absent."""
