"""Two checkpoints read as one: a second supplies the shards that the first lacks.

Published pruned checkpoints often leave out what they did not change: the engram shards of the
original, 203 GB of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.errors import SourceError
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.spec import TensorSpec


def supplemented(
    first: Checkpoint, second: Checkpoint, expected: Sequence[TensorSpec]
) -> tuple[Checkpoint, frozenset[str]]:
    """``first`` with every expected tensor it lacks taken from ``second``.

    Files of ``second`` keep their names unless ``first`` has one of that name.

    Args:
        first: The checkpoint whose config counts; its index may name absent shards.
        second: Where missing tensors come from.
        expected: Every tensor that is wanted.

    Returns:
        The checkpoint, and the names of the files that come from ``second``.

    Raises:
        SourceError: ``second`` supplies nothing, or needs a file name that ``first`` uses.
    """
    has = {name for name, file in first.weight_map.items() if file in first.files}
    lacking = [spec.name for spec in expected if spec.name not in has]
    taken = {name: second.weight_map[name] for name in lacking if name in second.weight_map}
    names = frozenset(taken.values())
    if not names:
        raise SourceError(
            "the second source supplies nothing that the first lacks",
            file=second.folder,
            tensor=lacking[0] if lacking else None,
            expected=f"some of {len(lacking):,} tensors" if lacking else None,
            next_step="Name one that has them." if lacking else "Leave it out.",
        )
    clash = sorted(names & first.files.keys())
    if clash:
        raise SourceError(
            "both sources have a shard of this name, with other tensors",
            file=second.folder / clash[0],
            next_step="Rename the shard in a copy of the second source, and in its index.",
        )
    kept = {name: file for name, file in first.weight_map.items() if name in has}
    files = {**first.files, **{name: second.files[name] for name in sorted(names)}}
    # The index's total counts its own shards only.
    merged = replace(first, files=files, weight_map={**kept, **taken}, total_size=None)
    return merged, names
