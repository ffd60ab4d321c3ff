"""A file's bytes as a reply: whole, or the range that was asked for (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.hub_server.blob import Blob
from tests.hub_server.call import Call
from tests.hub_server.reply import Reply

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def content_reply(call: Call, blob: Blob, headers: Mapping[str, str]) -> Reply:
    """200 with all of ``blob``, 206 with a range of it, or 416."""
    common = {
        "Accept-Ranges": "bytes",
        "ETag": blob.etag,
        "Content-Type": "application/octet-stream",
        **headers,
    }
    span = _span(call, blob)
    if span is None:
        return Reply(200, common, blob=blob, nbytes=blob.nbytes)
    first, end = span
    if first >= min(end, blob.nbytes):
        return Reply(416, common | {"Content-Range": f"bytes */{blob.nbytes}"})
    said = {"Content-Range": f"bytes {first}-{end - 1}/{blob.nbytes}"}
    return Reply(206, common | said, blob=blob, first=first, nbytes=end - first)


def _span(call: Call, blob: Blob) -> tuple[int, int] | None:
    """First byte and end; nothing where no single range is asked for or another file is meant."""
    match = _RANGE.fullmatch(call.headers.get("range", ""))
    if match is None or match[0] == "bytes=-":
        return None
    if call.headers.get("if-range", blob.etag) != blob.etag:
        return None
    if not match[1]:
        return max(0, blob.nbytes - int(match[2])), blob.nbytes
    last = int(match[2]) if match[2] else blob.nbytes - 1
    if last < int(match[1]) and match[2]:
        return None
    return int(match[1]), min(last + 1, blob.nbytes)
