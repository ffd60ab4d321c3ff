"""JSON objects from files nobody vouches for: strict, bounded, and only our errors come out."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NoReturn

from pipeline.errors import SourceError
from pipeline.files import read_exact, reading
from pipeline.source.lfs_pointer import refuse_lfs_pointer

MAX_JSON_NBYTES = 100_000_000
"""The safetensors limit on a header, used for every JSON text here (the real index has 7.5 MB)."""

_MAX_SHOWN = 80


class _BrokenRuleError(ValueError):
    """A rule that JSON itself leaves open: a key given twice, or a number that is none."""


def read_json_object(path: Path) -> tuple[dict[str, object], bytes]:
    """The JSON object that is the whole of ``path``, and the bytes it was read from.

    Raises:
        SourceError: Missing or unreadable, larger than `MAX_JSON_NBYTES`, a git-lfs pointer, or
            what `parse_json_object` refuses.
    """
    with reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        if nbytes > MAX_JSON_NBYTES:
            raise SourceError(
                "the file is too large for a JSON description",
                file=path,
                expected=f"at most {MAX_JSON_NBYTES:,} bytes",
                found=f"{nbytes:,} bytes",
            )
        content = bytearray(nbytes)
        read_exact(fd, memoryview(content), 0, path)
    text = bytes(content)
    refuse_lfs_pointer(text, path)
    return parse_json_object(text, path), text


def parse_json_object(text: bytes, path: Path, what: str = "the file") -> dict[str, object]:
    """The one JSON object in ``text``, UTF-8, no key twice, no NaN; ``what`` names it in errors.

    Raises:
        SourceError: ``text`` is anything else, or nested so deep that parsing it is unsafe.
    """
    try:
        parsed = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_number,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise SourceError(f"{what} is not UTF-8 text", file=path, found=str(error)) from None
    except _BrokenRuleError as error:
        raise SourceError(f"{what} {error}", file=path) from None
    except ValueError as error:
        raise SourceError(f"{what} is not valid JSON", file=path, found=shown(error)) from None
    except (RecursionError, MemoryError):
        raise SourceError(f"{what} is nested too deep or too large to parse", file=path) from None
    if not isinstance(parsed, dict):
        raise SourceError(f"{what} is not a JSON object", file=path, found=type(parsed).__name__)
    return parsed


def shown(value: object) -> str:
    """``value`` in a form that is safe and short enough for a message."""
    text = str(value) if isinstance(value, str | Exception) else _repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _repr(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, list | dict) and len(value) > _MAX_SHOWN:
        return f"{type(value).__name__} of {len(value):,}"
    try:
        return repr(value)
    except (ValueError, RecursionError):  # ints beyond Python's digit limit, deep lists
        return f"a {type(value).__name__}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BrokenRuleError(f"holds the key {shown(key)!r} twice")
            seen.add(key)
    return entries


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    raise _BrokenRuleError(f"holds {shown(digits)}, which is no finite number")
