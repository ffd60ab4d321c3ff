"""Digests: sha256 of bytes and of canonical JSON, the names of everything this project makes."""

from __future__ import annotations

import hashlib
import json


def sha256(content: bytes | memoryview) -> str:
    """Hex sha256 of ``content``."""
    return hashlib.sha256(content).hexdigest()


def canonical_json(spec: object) -> bytes:
    """One byte form per value: sorted keys, no spaces, ASCII, no NaN.

    Raises:
        ValueError: ``spec`` holds a NaN or an infinity.
        TypeError: ``spec`` holds something JSON cannot express.
    """
    return json.dumps(
        spec, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def spec_digest(spec: object) -> str:
    """The identity of whatever ``spec`` fully describes: hex sha256 of its canonical JSON."""
    return sha256(canonical_json(spec))
