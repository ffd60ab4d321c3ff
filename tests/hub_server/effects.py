"""What can go wrong with one answer, as changes to how it is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Protocol

from tests.hub_server.call import Call
from tests.hub_server.reply import Reply, json_reply, storage_refusal


@dataclass(frozen=True, slots=True)
class Delivery:
    """A reply and how it goes over the wire. Points count bytes of this answer's body.

    ``declared_nbytes`` is the Content-Length; None sends none, and the end of the connection is
    the end of the body.
    """

    reply: Reply
    declared_nbytes: int | None
    delay_s: float = 0
    hangs_up: bool = False
    stop_at: int | None = None
    resets: bool = False
    stall_at: int | None = None
    stall_s: float = 0
    flip_at: int | None = None
    nbytes_per_s: int | None = None
    expires_link: bool = False

    @classmethod
    def of(cls, reply: Reply) -> Delivery:
        """``reply`` as it should be sent."""
        return cls(reply, reply.nbytes)


class Effect(Protocol):
    """One kind of fault."""

    def fits(self, call: Call, reply: Reply) -> bool:
        """Whether this answer can show it; one that cannot is not counted either."""
        ...

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        """The delivery with the fault, at ``position`` of the body where one is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class _AnyAnswer:
    def fits(self, call: Call, reply: Reply) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _InBody:
    """A fault ``after`` so many bytes of the body, unless the fault names a position itself."""

    after: int = 0

    def fits(self, call: Call, reply: Reply) -> bool:
        return call.method != "HEAD" and reply.status in (200, 206)

    def _point(self, position: int | None) -> int:
        return self.after if position is None else position


@dataclass(frozen=True, slots=True)
class Status(_AnyAnswer):
    """Another status: 429, 500, 502, 503... ``ratelimit`` adds the hub's header, in seconds."""

    status: int
    retry_after: int | None = None
    ratelimit: int | None = None

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        reply = json_reply({"error": HTTPStatus(self.status).phrase}, self._headers(), self.status)
        return replace(delivery, reply=reply, declared_nbytes=reply.nbytes)

    def _headers(self) -> Mapping[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.ratelimit is not None:
            headers["RateLimit"] = f'"resolvers";r=0;t={self.ratelimit}'
        return headers


@dataclass(frozen=True, slots=True)
class Hangup(_AnyAnswer):
    """The connection ends before a single byte of an answer."""

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, hangs_up=True)


@dataclass(frozen=True, slots=True)
class Delay(_AnyAnswer):
    """Nothing at all for ``seconds``, then the answer."""

    seconds: float

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, delay_s=self.seconds)


@dataclass(frozen=True, slots=True)
class Cut(_InBody):
    """The connection is reset after so many bytes of the body, all of which arrive."""

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, stop_at=self._point(position), resets=True)


@dataclass(frozen=True, slots=True)
class Truncated(_InBody):
    """The body ends early and the connection ends in good order.

    Content-Length still declares all of it, or, with ``is_declared``, just what is sent: only the
    size of the file can tell then.
    """

    is_declared: bool = False

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        stop = min(self._point(position), delivery.reply.nbytes)
        declared = stop if self.is_declared else delivery.declared_nbytes
        return replace(delivery, stop_at=stop, declared_nbytes=declared)


@dataclass(frozen=True, slots=True)
class Stall(_InBody):
    """So many bytes of the body, then nothing for ``seconds``, then the rest."""

    seconds: float = 1.0

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, stall_at=self._point(position), stall_s=self.seconds)


@dataclass(frozen=True, slots=True)
class Flip(_InBody):
    """One bit of one byte is wrong; sizes are right."""

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, flip_at=self._point(position))


@dataclass(frozen=True, slots=True)
class Slow(_InBody):
    """No more than ``nbytes_per_s``."""

    nbytes_per_s: int = 1 << 20

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        return replace(delivery, nbytes_per_s=self.nbytes_per_s)


@dataclass(frozen=True, slots=True)
class IgnoredRange:
    """200 with the whole file instead of 206, with or without a Content-Length."""

    is_declared: bool = True

    def fits(self, call: Call, reply: Reply) -> bool:
        return reply.status == 206

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        reply = delivery.reply
        assert reply.blob is not None
        headers = {name: value for name, value in reply.headers.items() if name != "Content-Range"}
        whole = replace(reply, status=200, headers=headers, first=0, nbytes=reply.blob.nbytes)
        declared = whole.nbytes if self.is_declared else None
        return replace(delivery, reply=whole, declared_nbytes=declared)


@dataclass(frozen=True, slots=True)
class ExpiredLink:
    """The CDN link asked for is valid no more: 403 from now on, until the file is resolved anew."""

    def fits(self, call: Call, reply: Reply) -> bool:
        return call.origin == "cdn" and reply.status in (200, 206)

    def applied(self, delivery: Delivery, position: int | None) -> Delivery:
        reply = storage_refusal(403, "AccessDenied", "Request has expired").reply
        return replace(delivery, reply=reply, declared_nbytes=reply.nbytes, expires_link=True)
