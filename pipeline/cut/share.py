"""Files of which no byte changes: the same file under one more name, its digests known."""

from __future__ import annotations

from collections.abc import Callable

from pipeline import files, sharing
from pipeline.errors import SourceError
from pipeline.gguf.digests import digests_of
from pipeline.gguf.part import ShardDigests
from pipeline.gguf.reader import GgufFile
from pipeline.store import ShardRecord, ShardStore


def share_shard(
    store: ShardStore,
    spec: str,
    file: GgufFile,
    *,
    listed: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> ShardRecord:
    """Put a finished file into ``store`` as the shard ``spec``, without copying it where links go.

    Its bytes are hashed where they lie then, whole and by tensor.

    Args:
        store: Where shards lie.
        spec: The shard's identity.
        file: The finished file.
        listed: Hex sha256 of the file, where its makers tell it.
        progress: Told the bytes hashed.

    Raises:
        SourceError: The file changed since its header was read, or is not what it is listed as.
        OutputError: It can be neither linked nor copied.
    """
    stored = store.path(spec)
    sharing.link_or_copy(file.path.resolve(), stored)  # a link to a link may lead nowhere
    digests = digests_of(stored, list(file.tensors.values()), progress=progress)
    whole = digests.pop("")
    wanted = listed or (whole if stored.samefile(file.path) else files.sha256_of(file.path))
    is_settled = files.stamp(file.path) == (file.nbytes, file.modified_ns)
    if whole != wanted or not is_settled:
        files.remove(stored)
        raise SourceError(
            "the file was changed after its header was read"
            if whole == wanted
            else "the file has another digest than it should",
            file=file.path,
            expected=wanted,
            found=whole,
            next_step="Fetch or make it again; its damage would be carried on.",
        )
    return store.save(spec, stored, ShardDigests(whole, digests))
