"""The keys a loader of each form asks for: present, of a type it takes, and none it trips over.

Which types pass beside the written one was found by changing each once in a running engine: loaders
take either signedness for lists of small integers, and for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, ValueType
from pipeline.model.contract.form import V41_FLAGS
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form
from pipeline.model.metadata.required import KeyType, required_keys, spare_keys

_EITHER_SIGN: Mapping[KeyType, KeyType] = {
    (ValueType.ARRAY, ValueType.INT32): (ValueType.ARRAY, ValueType.UINT32),
    (ValueType.ARRAY, ValueType.UINT32): (ValueType.ARRAY, ValueType.INT32),
}
_ONE_FOR_ALL_LAYERS: KeyType = (ValueType.FLOAT32, None)
_CLAMPS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")


@dataclass(frozen=True, slots=True)
class _Stray:
    """Keys of one form that must not be there; ``rule`` matches what follows the architecture."""

    rule: str
    what: str
    expected: str
    next_step: str | None = None


_MTP = _Stray(
    r"nextn_predict_layers",
    "announces MTP blocks",
    "none: the MTP module is a file of its own",
    "A DSpark stage that block_count counts is run as one more layer, without a word.",
)
_MAINLINE_KEY = _Stray(
    r"ple\..*",
    "belongs to the mainline layout",
    "no ple.* key in the fork layout",
    "Readers of both layouts would take this file for the other one.",
)
_FORK_KEY = _Stray(
    r"engram\.(?!(token_map|pad_token_id)$).*",
    "belongs to the fork layout",
    "no engram.* key but engram.token_map and engram.pad_token_id",
    "Some readers prefer it and would look up wrong rows of the one table.",
)
_ENGRAM_KEY = _Stray(
    r"(engram|ple)\..*|embedding_length_per_layer_input",
    "is about engram tables",
    "none: only V4.1's target has such tables",
)
_V41_FLAG = _Stray(
    "|".join(map(re.escape, V41_FLAGS)),
    "calls this a V4.1 draft",
    "none in a draft with output_hc_* tensors",
)

_STRAYS: Mapping[Form, tuple[_Stray, ...]] = {
    V41_MAINLINE: (_MTP, _FORK_KEY),
    V41_FORK: (_MTP, _MAINLINE_KEY),
    V4_TARGET: (_MTP, _ENGRAM_KEY),
    V41_DRAFT: (_MTP, _ENGRAM_KEY),
    V4_DRAFT: (_MTP, _ENGRAM_KEY, _V41_FLAG),
}


def check_keys(
    entries: Mapping[str, KeyValue], form: Form, *, union: bool
) -> Iterator[FormatError]:
    """A problem for each key that is missing, has a type loaders refuse, or must not be there."""
    spared = frozenset() if union else spare_keys(form)
    for key, wanted in required_keys(form).items():
        if key not in spared:
            yield from _check_key(key, wanted, entries.get(key))
    yield from _stray_keys(entries, form)


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
    also = (_ONE_FOR_ALL_LAYERS,) if key.endswith(_CLAMPS) else ()
    return (wanted, *also, *((_EITHER_SIGN[wanted],) if wanted in _EITHER_SIGN else ()))


def _stray_keys(entries: Mapping[str, KeyValue], form: Form) -> Iterator[FormatError]:
    prefix = f"{form.architecture}."
    for key in entries:
        for stray in _STRAYS[form]:
            if key.startswith(prefix) and re.fullmatch(stray.rule, key.removeprefix(prefix)):
                yield FormatError(
                    f"the key {key} {stray.what}",
                    expected=stray.expected,
                    next_step=stray.next_step,
                )


def _type_name(key_type: KeyType) -> str:
    kind, element = key_type
    return kind.name if element is None else f"{kind.name} of {element.name}"
