"""One request as the routes see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Origin = Literal["hub", "cdn"]


@dataclass(frozen=True, slots=True)
class Call:
    """Method, undecoded path, query and what matters of the headers.

    ``file`` is what faults and the log go by: the name inside the repository, or ``api/tree`` and
    the like for an API route. ``repo``, ``revision`` and ``path`` are decoded parts of the path.
    """

    origin: Origin
    method: str
    url_path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes
    file: str
    repo: str = ""
    revision: str = ""
    path: str = ""

    def flag(self, name: str) -> bool:
        """Whether the query says yes to ``name``."""
        return self.query.get(name, [""])[-1].lower() in ("true", "1")

    @property
    def token(self) -> str | None:
        """The bearer token, if one was sent."""
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token if kind.lower() == "bearer" else None
