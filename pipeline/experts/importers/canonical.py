"""Our own saliency files: a safetensors file with the sums under their names, F64.

Everything else that a table says stands in the header's ``__metadata__``. One byte form for each
table: names sorted, no gaps, no time of writing. Two things may be added and change nothing of the
table: the sums of two halves of the text, ``halves.*`` ``[2, n_layers, n_experts]``, and where the
numbers come from, in words of whoever measured them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
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
_HALVES = "halves."
_HALVES_TOKENS = "halves_tokens"
_PROVENANCE = "provenance"
_LENGTH_NBYTES = 8
_MOST_NBYTES = 1 << 30


Halves = tuple[SaliencyTable, SaliencyTable]


def write_saliency(
    path: Path,
    table: SaliencyTable,
    *,
    halves: Halves | None = None,
    provenance: Mapping[str, object] | None = None,
) -> None:
    """Put ``table`` under ``path``: the same arguments give the same bytes.

    Args:
        path: Where to.
        table: The sums over all of the text.
        halves: The same sums over two halves of it, which add up to ``table``.
        provenance: What else is known of the measurement; JSON.

    Raises:
        OutputError: It cannot be written.
    """
    write_whole(path, saliency_bytes(table, halves=halves, provenance=provenance))


def saliency_bytes(
    table: SaliencyTable,
    *,
    halves: Halves | None = None,
    provenance: Mapping[str, object] | None = None,
) -> bytes:
    """The file that `write_saliency` writes."""
    payload = b""
    entries: dict[str, object] = {}
    arrays: dict[str, F64] = {str(name): values for name, values in table.sums.items()}
    if halves is not None:
        own = {name: np.stack([half.sums[name] for half in halves]) for name in halves[0].sums}
        arrays |= {_HALVES + name: values for name, values in own.items()}
    for name, values in sorted(arrays.items()):
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
        **_more(halves, provenance),
    }
    header = canonical_json(entries)
    header += b" " * (-len(header) % _LENGTH_NBYTES)  # the payload begins at a multiple of 8
    return len(header).to_bytes(_LENGTH_NBYTES, "little") + header + payload


def _more(halves: Halves | None, provenance: Mapping[str, object] | None) -> dict[str, str]:
    more: dict[str, str] = {}
    if halves is not None:
        more[_HALVES_TOKENS] = _text([half.tokens and list(half.tokens) for half in halves])
    if provenance is not None:
        more[_PROVENANCE] = _text(dict(provenance))
    return more


def read_canonical(path: Path) -> SaliencyTable:
    """A table that `write_saliency` wrote.

    Raises:
        SourceError: The file is damaged, of another form, or its sums were changed by hand.
    """
    return _table(path, *_content(path))


def read_canonical_halves(path: Path) -> Halves:
    """The tables of two halves of the text, where `write_saliency` was given them.

    Raises:
        SourceError: As `read_canonical`, there are no halves, or they do not add up to the whole.
    """
    said, arrays = _content(path)
    whole = _table(path, said, arrays)
    names = [name for name in whole.sums if _HALVES + name in arrays]
    if len(names) < len(whole.sums):
        raise SourceError(
            "the file keeps no two halves of the text",
            file=path,
            expected=", ".join(_HALVES + name for name in whole.sums),
            found=", ".join(arrays),
        )
    for name in names:
        stored, both = arrays[_HALVES + name], whole.sums[name]
        if stored.shape != (2, *both.shape) or not np.allclose(stored.sum(0), both, 1e-9, 0):
            raise SourceError(
                "the halves do not add up to the whole", file=path, tensor=_HALVES + name
            )
    try:
        first, second = (_tokens(_text(own)) for own in json.loads(said[_HALVES_TOKENS]))
    except (KeyError, TypeError, ValueError) as error:
        raise _misformed(path, error) from None

    def half(n: int, seen: tuple[int, ...] | None) -> SaliencyTable:
        return replace(
            whole,
            origins=tuple(Origin(o.sha256, f"{o.name} half {n + 1}") for o in whole.origins),
            sums={name: arrays[_HALVES + name][n] for name in names},
            tokens=seen,
        )

    with located(path):
        return half(0, first), half(1, second)


def read_provenance(path: Path) -> dict[str, object]:
    """What `write_saliency` was told of the measurement; empty where it was told nothing.

    Raises:
        SourceError: The file is damaged or of another form.
    """
    text = _metadata(path, read_source_file(path)).get(_PROVENANCE, "{}")
    return parse_json_object(text.encode(), path, _PROVENANCE)


def _content(path: Path) -> tuple[Mapping[str, str], Mapping[str, F64]]:
    """What the header says, and every array."""
    file = read_source_file(path)
    said = _metadata(path, file)
    arrays: dict[str, F64] = {}
    for tensor in file.tensors.values():
        _require_sum(path, tensor)
        arrays[tensor.name] = _values(path, tensor)
    payload = b"".join(values.astype("<f8").tobytes() for values in arrays.values())
    if said.get("sums_sha256") != sha256(payload):
        raise SourceError(
            "the sums are not those that the file was written with",
            file=path,
            next_step="Write it again from its source.",
        )
    return said, arrays


def _table(path: Path, said: Mapping[str, str], arrays: Mapping[str, F64]) -> SaliencyTable:
    sums = {Sum(name): values for name, values in arrays.items() if name in set(Sum)}
    try:
        facts = (said["kind"], Honesty(said["honesty"]), _origins(said["origins"]))
        tokens, top_k = _tokens(said["tokens"]), _top_k(said["top_k"])
    except (KeyError, TypeError, ValueError) as error:
        raise _misformed(path, error) from None
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


def _misformed(path: Path, error: Exception) -> SourceError:
    return SourceError(f"the header is not of the form {FORMAT}", file=path, found=shown(error))


def _require_sum(path: Path, tensor: SourceTensor) -> None:
    is_sum = tensor.name.removeprefix(_HALVES) in set(Sum) and tensor.dtype == "F64"
    if not is_sum or tensor.nbytes > _MOST_NBYTES:
        raise SourceError(
            "a tensor is not a sum of a saliency table",
            file=path,
            tensor=tensor.name,
            expected=f"F64, one of {', '.join(Sum)}",
            found=f"{tensor.dtype} {shown(tensor.shape)}",
        )


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
