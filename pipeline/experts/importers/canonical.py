"""Our own saliency files: a safetensors file with the sums under their names, F64.

Everything else that a table says stands in the header's ``__metadata__``. One byte form for each
table: names sorted, no gaps, no time of writing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.digest import canonical_json, sha256
from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.located import located
from pipeline.experts.origin import Origin
from pipeline.experts.saliency import F64, SaliencyTable, Sum
from pipeline.files import read_bytes, write_whole
from pipeline.source.header import SourceFile, SourceTensor, read_source_file
from pipeline.source.json_object import parse_json_object, shown

FORMAT = "expert-saliency/1"
"""Changes when the same file would mean another table."""

_METADATA = "__metadata__"
_LENGTH_NBYTES = 8
_MOST_NBYTES = 1 << 30


def write_saliency(path: Path, table: SaliencyTable) -> None:
    """Put ``table`` under ``path``: the same table gives the same bytes.

    Raises:
        OutputError: It cannot be written.
    """
    write_whole(path, saliency_bytes(table))


def saliency_bytes(table: SaliencyTable) -> bytes:
    """The file that `write_saliency` writes."""
    payload = b""
    entries: dict[str, object] = {}
    for name, values in sorted(table.sums.items()):
        content = np.ascontiguousarray(values, "<f8").tobytes()
        span = [len(payload), len(payload) + len(content)]
        entries[name] = {"dtype": "F64", "shape": list(values.shape), "data_offsets": span}
        payload += content
    entries[_METADATA] = {
        "format": FORMAT,
        "kind": table.kind,
        "honesty": str(table.honesty),
        "origins": _text([[origin.name, origin.sha256] for origin in table.origins]),
        "tokens": _text(None if table.tokens is None else list(table.tokens)),
        "top_k": _text(table.top_k),
        "sums_sha256": sha256(payload),
    }
    header = canonical_json(entries)
    header += b" " * (-len(header) % _LENGTH_NBYTES)  # the payload begins at a multiple of 8
    return len(header).to_bytes(_LENGTH_NBYTES, "little") + header + payload


def read_canonical(path: Path) -> SaliencyTable:
    """A table that `write_saliency` wrote.

    Raises:
        SourceError: The file is damaged, of another form, or its sums were changed by hand.
    """
    file = read_source_file(path)
    said = _metadata(path, file)
    sums = {_name(path, t): _values(path, t) for t in file.tensors.values()}
    payload = b"".join(values.astype("<f8").tobytes() for values in sums.values())
    if said.get("sums_sha256") != sha256(payload):
        raise SourceError(
            "the sums are not those that the file was written with",
            file=path,
            next_step="Write it again from its source.",
        )
    try:
        facts = (said["kind"], Honesty(said["honesty"]), _origins(said["origins"]))
        tokens, top_k = _tokens(said["tokens"]), _top_k(said["top_k"])
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the header is not of the form {FORMAT}", file=path, found=shown(error)
        ) from None
    with located(path):
        return SaliencyTable(*facts, sums, tokens, top_k)


def _metadata(path: Path, file: SourceFile) -> Mapping[str, str]:
    header = read_bytes(path, _LENGTH_NBYTES, file.header_nbytes - _LENGTH_NBYTES)
    said = parse_json_object(header, path, "the safetensors header").get(_METADATA)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise SourceError(
            "this safetensors file holds no saliency",
            file=path,
            expected=f"format {FORMAT} in its {_METADATA}",
            found=shown(said.get("format") if isinstance(said, dict) else None),
        )
    return said


def _name(path: Path, tensor: SourceTensor) -> Sum:
    is_sum = tensor.name in set(Sum) and tensor.dtype == "F64"
    if not is_sum or tensor.nbytes > _MOST_NBYTES:
        raise SourceError(
            "a tensor is not a sum of a saliency table",
            file=path,
            tensor=tensor.name,
            expected=f"F64, one of {', '.join(Sum)}",
            found=f"{tensor.dtype} {shown(tensor.shape)}",
        )
    return Sum(tensor.name)


def _values(path: Path, tensor: SourceTensor) -> F64:
    content = read_bytes(path, tensor.offset, tensor.nbytes)
    return np.frombuffer(content, "<f8").reshape(tensor.shape).astype(np.float64)


def _origins(text: str) -> tuple[Origin, ...]:
    return tuple(Origin(str(digest), str(name)) for name, digest in json.loads(text))


def _tokens(text: str) -> tuple[int, ...] | None:
    tokens = json.loads(text)
    return None if tokens is None else tuple(map(int, tokens))


def _top_k(text: str) -> int | None:
    top_k = json.loads(text)
    return None if top_k is None else int(top_k)


def _text(value: object) -> str:
    return canonical_json(value).decode()
