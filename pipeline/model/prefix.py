"""Keys under another architecture's name than the tensors', or under none, put right.

Some published V4.1 files carry V4's prefix on part of their keys, or call themselves `deepseek4`
altogether; engines then look for every key under the other name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pipeline.gguf.keys import KeyValue, text
from pipeline.gguf.model_file import GgufModel
from pipeline.model.dialects import FORK_TABLE, MAINLINE_TABLE
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Architecture
from pipeline.model.metadata.required import required_keys

_ARCHITECTURE_KEY = "general.architecture"
_FORMS = (V41_MAINLINE, V41_FORK, V4_TARGET, V41_DRAFT, V4_DRAFT)

_KNOWN = frozenset(
    key.removeprefix(f"{form.architecture}.")
    for form in _FORMS
    for key in required_keys(form)
    if key.startswith(f"{form.architecture}.")
)
"""Every key that belongs under an architecture's name, without it."""

_MISPLACED = re.compile(
    r"(?P<prefix>deepseek[\w-]*(\.\d[\w-]*)?|dflash)\.(?P<name>.+)", re.IGNORECASE
)
"""A key under the name of an architecture, or under a model's own, as ``deepseek4.1.`` is."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A model with its keys under the right name; ``keys`` maps each to what it was found as."""

    model: GgufModel
    architecture: str | None
    """What the file calls itself, where that is wrong."""
    keys: Mapping[str, str]

    @property
    def is_changed(self) -> bool:
        """Whether anything had to be put right."""
        return self.architecture is not None or bool(self.keys)


def with_right_prefix(model: GgufModel) -> Renamed:
    """``model`` as if all its keys began with the architecture that its tensors tell.

    A key that stands under the right name, too, keeps that value.
    """
    entries = model.key_values
    said = entries.get(_ARCHITECTURE_KEY)
    name = None if said is None else str(said.value)
    true = _architecture_of(model.tensors) or name
    if true not in list(Architecture):
        return Renamed(model, None, {})
    found = {key: right for key in entries if (right := _right_key(key, str(true)))}
    moved = {right: key for key, right in found.items() if right not in entries}
    if not moved and name == true:
        return Renamed(model, None, {})
    fixed = {key: entry for key, entry in entries.items() if key not in found}
    fixed |= {right: replace(entries[key], key=right) for right, key in moved.items()}
    fixed[_ARCHITECTURE_KEY] = text(_ARCHITECTURE_KEY, str(true))
    return Renamed(_with_keys(model, fixed), (name or "nothing") if name != true else None, moved)


def _architecture_of(tensors: Collection[str]) -> Architecture | None:
    """What only one architecture has: engram tables, a draft's projection, V4's compressors."""
    if MAINLINE_TABLE in tensors or any(FORK_TABLE.fullmatch(name) for name in tensors):
        return Architecture.DEEPSEEK41
    if "fc.weight" in tensors and "enc.output_norm.weight" in tensors:
        return Architecture.DFLASH
    if "output_hc_fn.weight" in tensors and any("attn_compressor_ape" in name for name in tensors):
        return Architecture.DEEPSEEK4
    return None


def _right_key(key: str, architecture: str) -> str | None:
    """Where ``key`` belongs, if it is one that belongs elsewhere."""
    if key in _KNOWN:
        return f"{architecture}.{key}"
    match = _MISPLACED.fullmatch(key)
    if match is None or match["prefix"] == architecture or match["name"] not in _KNOWN:
        return None
    return f"{architecture}.{match['name']}"


def _with_keys(model: GgufModel, entries: Mapping[str, KeyValue]) -> GgufModel:
    return GgufModel((replace(model.files[0], key_values=entries), *model.files[1:]))
