"""An answer before it is sent, and the refusals of the hub in its own headers and words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.hub_server.blob import Blob

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | bool | None"


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, headers and a body: ``nbytes`` of ``blob`` from ``first``, or else ``text``."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: bytes = b""
    blob: Blob | None = None
    first: int = 0
    nbytes: int = 0


class Refusal(Exception):
    """An answer that is an error, raised where it is found out."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.headers.get("X-Error-Message"))
        self.reply = reply


def text_reply(status: int, text: bytes, headers: Mapping[str, str]) -> Reply:
    """A reply with a short body of its own."""
    return Reply(status, headers, text, nbytes=len(text))


def json_reply(content: Json, headers: Mapping[str, str] | None = None, status: int = 200) -> Reply:
    """A reply as the API gives them."""
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return text_reply(status, json.dumps(content).encode(), {**kind, **(headers or {})})


def refusal(
    status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None
) -> Refusal:
    """An error in the hub's form: the message in a header and in the body, the code in a header."""
    described = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return Refusal(json_reply({"error": message}, {**described, **(headers or {})}, status))


def storage_refusal(status: int, code: str, message: str) -> Refusal:
    """An error in the form of the storage behind the CDN, which knows none of the hub's headers."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Refusal(text_reply(status, text.encode(), {"Content-Type": "application/xml"}))
