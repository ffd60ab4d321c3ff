"""A keep list in a file's metadata: under keys of our own, which engines pass over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import keep_digest
from pipeline.gguf.keys import KeyValue, ValueType, array, text, u32

PREFIX = "quantmill.experts."


def keep_keys(keep: KeepList | None) -> tuple[KeyValue, ...]:
    """What a file that lost experts says of it; nothing where there is no keep list.

    ``kept`` has the ids of all layers one after the other, in the numbering of the uncut model;
    ``criterion`` and ``honesty`` have an entry for each cut, the first cut first.
    """
    if keep is None:
        return ()
    criteria = [str(choice.criterion or "unknown") for choice in keep.choices]
    labels = [str(choice.honesty) for choice in keep.choices]
    return (
        u32(f"{PREFIX}source_count", keep.n_experts),
        text(f"{PREFIX}keep_sha256", keep_digest(keep)),
        array(f"{PREFIX}criterion", ValueType.STRING, criteria),
        array(f"{PREFIX}honesty", ValueType.STRING, labels),
        array(f"{PREFIX}kept", ValueType.INT32, [e for layer in keep.layers for e in layer]),
    )


def has_keep_keys(entries: Mapping[str, KeyValue]) -> bool:
    """Whether the file of these keys says that it lost experts."""
    return f"{PREFIX}kept" in entries


def keep_sentence(entries: Iterable[KeyValue]) -> str | None:
    """What a reader should know of the experts of a file with these keys, if it lost any."""
    found = {entry.key: entry.value for entry in entries if entry.key.startswith(PREFIX)}
    labels, criteria = found.get(f"{PREFIX}honesty"), found.get(f"{PREFIX}criterion")
    if not isinstance(labels, tuple) or not isinstance(criteria, tuple):
        return None
    cuts = ", then ".join(f"{c} ({h})" for c, h in zip(criteria, labels, strict=True))
    warning = " Proxies are not REAP: measure before you trust the cut." * (Honesty.PROXY in labels)
    return (
        f"Of {found[f'{PREFIX}source_count']} experts of a layer some were cut, by {cuts}; "
        f"keep list {found[f'{PREFIX}keep_sha256']}.{warning}"
    )
