"""Which experts a cut file holds, read back from its bytes: a second path beside the one that cut.

Nothing here looks at a plan. Two files tell by their shapes which tensors lost entries; an entry of
the cut file is recognised by its bytes among those of the whole one, in the router, its biases and
every stack apart. All of them have to tell the keep list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError, VerifyError
from pipeline.experts.keep import KeepList, shown
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor

SAMPLE_NBYTES = 1 << 12
"""An entry is known by its first, middle and last bytes, this many of each; a small one by all."""

_BLOCK = re.compile(r"blk\.(\d+)\.")


def check_cut(whole: GgufModel, cut: GgufModel, keep: KeepList) -> list[QuantmillError]:
    """What in ``cut`` is not what ``keep`` leaves of ``whole``.

    Entries that are alike in every sampled byte count for each other.
    """
    problems: list[QuantmillError] = []
    before, after = whole.tensors, cut.tensors
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        problems.append(VerifyError("the cut model has other tensors", tensor=odd[0]))
    for name in before.keys() & after.keys():
        ours, theirs = before[name][1], after[name][1]
        if ours.ne != theirs.ne:
            paths = whole.files[before[name][0]].path, cut.files[after[name][0]].path
            problems += _check_entries((paths[0], ours), (paths[1], theirs), keep)
    return problems


def _check_entries(
    whole: tuple[Path, GgufTensor], cut: tuple[Path, GgufTensor], keep: KeepList
) -> Iterator[VerifyError]:
    path, tensor = cut
    block, (*inner, n_before) = _BLOCK.match(tensor.name), whole[1].ne
    layer = int(block[1]) if block else keep.n_layers
    if layer >= keep.n_layers or n_before != keep.n_experts or tensor.ne != (*inner, keep.n_kept):
        yield VerifyError(
            "the tensor has lost something else than experts",
            file=path,
            tensor=tensor.name,
            expected=f"{whole[1].ne}, or {keep.n_kept} of {keep.n_experts} experts",
            found=tensor.ne,
        )
        return
    known: dict[bytes, list[int]] = {}
    for expert, content in enumerate(_entries(*whole)):
        known.setdefault(content, []).append(expert)
    for slot, content in enumerate(_entries(path, tensor)):
        expert, found = keep.layers[layer][slot], known.get(content, ())
        if expert not in found:
            yield VerifyError(
                f"entry {slot} of the tensor is not that of the expert which the keep list names",
                file=path,
                tensor=tensor.name,
                expected=f"expert {expert}",
                found=f"expert {shown(found)}" if found else "no expert of the model",
                next_step="Make its shard again; if it stays so, report it.",
            )


def _entries(path: Path, tensor: GgufTensor) -> Iterator[bytes]:
    """What each entry along the last dimension is known by."""
    nbytes = tensor.nbytes // tensor.ne[-1]
    samples = [(0, nbytes)]
    if nbytes > 3 * SAMPLE_NBYTES:
        starts = (0, nbytes // 2, nbytes - SAMPLE_NBYTES)
        samples = [(start, SAMPLE_NBYTES) for start in starts]
    with files.reading(path) as fd:
        for entry in range(tensor.ne[-1]):
            content = hashlib.sha256()
            for start, size in samples:
                sample = memoryview(bytearray(size))
                files.read_exact(fd, sample, tensor.offset + entry * nbytes + start, path)
                content.update(sample)
            yield content.digest()
