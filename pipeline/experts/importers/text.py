"""Text files of bounded size, and whether they hold one JSON object or one a line."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.files import read_exact, reading
from pipeline.source.json_object import MAX_JSON_NBYTES, parse_json_object


def read_text(path: Path) -> bytes:
    """The whole of ``path``.

    Raises:
        SourceError: It cannot be read, or is larger than any list of experts.
    """
    with reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        if nbytes > MAX_JSON_NBYTES:
            raise SourceError(
                "the file is too large for a text about experts",
                file=path,
                expected=f"at most {MAX_JSON_NBYTES:,} bytes",
                found=f"{nbytes:,} bytes",
            )
        content = bytearray(nbytes)
        read_exact(fd, memoryview(content), 0, path)
    return bytes(content)


def decoded(text: bytes, path: Path) -> str:
    """``text`` as characters, without the mark that some tools begin UTF-8 with.

    Raises:
        SourceError: It is not UTF-8.
    """
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError("the file is not UTF-8 text", file=path, found=str(error)) from None


def has_lines(text: bytes, path: Path) -> bool:
    """Whether the first line is a JSON object of its own and others follow."""
    first, _, rest = text.strip().partition(b"\n")
    if not rest:
        return False
    try:
        parse_json_object(first, path)
    except SourceError:
        return False
    return True
