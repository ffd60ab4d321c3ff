"""Signed links to the CDN: valid for a while, and revocable one by one or all at once."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import threading
import time
from urllib.parse import quote, urlencode

from tests.hub_server.call import Call
from tests.hub_server.reply import storage_refusal


class Links:
    """Signs paths and checks signatures; every link is a new one."""

    def __init__(self) -> None:
        self.seconds = 3600.0
        self._key = secrets.token_bytes(16)
        self._serial = itertools.count()
        self._expired: set[str] = set()
        self._signed: set[str] = set()
        self._lock = threading.Lock()

    def sign(self, repo: str, commit: str, name: str) -> str:
        """Path and query of a fresh link to a file of a commit."""
        path = f"/{quote(repo)}/{commit}/{quote(name)}"
        expires = f"{time.time() + self.seconds:.3f}"
        key_pair = f"K{next(self._serial):06d}"
        signature = self._signature(path, expires, key_pair)
        with self._lock:
            self._signed.add(signature)
        query = {"Expires": expires, "Signature": signature, "Key-Pair-Id": key_pair}
        return f"{path}?{urlencode(query)}"

    def check(self, call: Call) -> None:
        """Refuse with 403, as the storage does, what was not signed or is no longer valid."""
        expires, signature, key_pair = (
            call.query.get(name, [""])[0] for name in ("Expires", "Signature", "Key-Pair-Id")
        )
        if signature != self._signature(call.url_path, expires, key_pair):
            raise storage_refusal(403, "SignatureDoesNotMatch", "The signature does not match")
        with self._lock:
            is_expired = signature in self._expired
        if is_expired or time.time() >= float(expires):
            raise storage_refusal(403, "AccessDenied", "Request has expired")

    def expire(self, call: Call) -> None:
        """Make the link of ``call`` invalid for good."""
        with self._lock:
            self._expired.update(call.query.get("Signature", []))

    def expire_all(self) -> None:
        """Make every link handed out so far invalid."""
        with self._lock:
            self._expired |= self._signed

    def _signature(self, *parts: str) -> str:
        return hmac.new(self._key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()
