"""What this project wrote into a file, in the metadata of what is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import FILE_KEYS, GgufModel

RELEASE_KEY = "quantmill.source.config_sha256"
"""By which a target and a draft of one checkpoint know each other, however often remade."""

_OWN = "quantmill."
_EARLIER: Mapping[str, str] = {
    "quantmill.recipe": "quantmill.source.recipe",
    "quantmill.imatrix.sha256": "quantmill.source.imatrix_sha256",
}
"""What told how the file was made, and tells now what its successor was made of."""

_MADE_ANEW = ("quantmill.recipe.", "quantmill.imatrix.", RELEASE_KEY, *FILE_KEYS)
"""Beginnings of what every file says of its own making and its own bytes."""


def carried_keys(model: GgufModel, *, without: str) -> tuple[KeyValue, ...]:
    """The keys of ours in ``model`` that go on, but for those that begin with ``without``."""
    found = {e.key: e for e in _carried(model) if not e.key.startswith(without)}
    return tuple(found.values())


def _carried(model: GgufModel) -> Iterator[KeyValue]:
    for key, entry in model.key_values.items():
        if key in _EARLIER:
            yield replace(entry, key=_EARLIER[key])
        elif (
            key.startswith(_OWN) and not key.startswith(_MADE_ANEW) and key not in _EARLIER.values()
        ):
            yield entry
