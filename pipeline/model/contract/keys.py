"""The keys a loader of either layout asks for: present, of a type it takes, and none it trips over.

Which types pass beside the written one was found by changing each once in a running engine: loaders
take either signedness for lists of small integers, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, ValueType
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import PREFIX
from pipeline.model.metadata.required import UNION_KEYS, KeyType, required_keys

_EITHER_SIGN: Mapping[KeyType, KeyType] = {
    (ValueType.ARRAY, ValueType.INT32): (ValueType.ARRAY, ValueType.UINT32),
    (ValueType.ARRAY, ValueType.UINT32): (ValueType.ARRAY, ValueType.INT32),
}
_ONE_FOR_ALL_LAYERS: KeyType = (ValueType.FLOAT32, None)
_CLAMPS = (f"{PREFIX}swiglu_clamp_exp", f"{PREFIX}swiglu_clamp_shexp")

_MAINLINE_ENGRAM = (f"{PREFIX}engram.token_map", f"{PREFIX}engram.pad_token_id")
"""The only ``engram.*`` keys of the mainline layout."""


def check_keys(
    entries: Mapping[str, KeyValue], layout: Layout, *, union: bool
) -> Iterator[FormatError]:
    """A problem for each key that is missing, has a type loaders refuse, or must not be there."""
    for key, wanted in required_keys(layout).items():
        if union or key not in UNION_KEYS or layout is Layout.MAINLINE:
            yield from _check_key(key, wanted, entries.get(key))
    yield from _stray_keys(entries, layout)


def _check_key(key: str, wanted: KeyType, entry: KeyValue | None) -> Iterator[FormatError]:
    if entry is None:
        yield FormatError(f"the key {key} is missing", expected=_type_name(wanted))
    elif (entry.type, entry.element) not in _accepted(key, wanted):
        yield FormatError(
            f"the key {key} has a type that loaders refuse",
            expected=_type_name(wanted),
            found=_type_name((entry.type, entry.element)),
        )


def _accepted(key: str, wanted: KeyType) -> tuple[KeyType, ...]:
    also = (_ONE_FOR_ALL_LAYERS,) if key in _CLAMPS else ()
    return (wanted, *also, *((_EITHER_SIGN[wanted],) if wanted in _EITHER_SIGN else ()))


def _stray_keys(entries: Mapping[str, KeyValue], layout: Layout) -> Iterator[FormatError]:
    for key in entries:
        if layout is Layout.FORK and key.startswith(f"{PREFIX}ple."):
            yield FormatError(
                f"the key {key} belongs to the mainline layout",
                expected="no ple.* key in the fork layout",
                next_step="Readers of both layouts would take this file for the other one.",
            )
        is_engram = key.startswith(f"{PREFIX}engram.") and key not in _MAINLINE_ENGRAM
        if layout is Layout.MAINLINE and is_engram:
            yield FormatError(
                f"the key {key} belongs to the fork layout",
                expected=f"no engram.* key but {' and '.join(_MAINLINE_ENGRAM)}",
                next_step="Some readers prefer it and would look up wrong rows of the one table.",
            )
        if key == f"{PREFIX}nextn_predict_layers":
            yield FormatError(
                f"the key {key} announces MTP blocks",
                expected="none: the MTP module is a file of its own",
            )


def _type_name(key_type: KeyType) -> str:
    kind, element = key_type
    return kind.name if element is None else f"{kind.name} of {element.name}"
