"""Plans held against loaders before a weight is read, and finished files against their plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pipeline import files
from pipeline.errors import FormatError, QuantmillError, VerifyError
from pipeline.gguf.header import ALIGNMENT, VERSION
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufFile, GgufTensor, read_gguf
from pipeline.model.contract.check import check_contract
from pipeline.plan import Plan, PlannedShard


def check_plan(plan: Plan) -> list[FormatError]:
    """What a loader would refuse or silently misread in the files that ``plan`` describes.

    Config values that no engine could use show here, before a weight is read. The files are looked
    at as one: which tensor lies in which is no loader's business.
    """
    tensors = {
        t.name: GgufTensor(t.name, t.target.shape[::-1], t.type, t.offset, t.nbytes)
        for t in plan.tensors
    }
    keys = {entry.key: entry for entry in plan.key_values}
    whole = GgufFile(Path(plan.name), plan.nbytes, VERSION, keys, tensors, 0, ALIGNMENT)
    return check_contract(GgufModel((whole,)), plan.form)


def verify_files(plan: Plan, paths: Sequence[Path]) -> list[QuantmillError]:
    """What differs between the files under ``paths``, in shard order, and their plan.

    Weights are not read.

    Every shard must have the exact length, the exact header bytes, and, as the reader understands
    that header, the planned tensors at the planned places, none over another.
    """
    problems: list[QuantmillError] = []
    for shard, path in zip(plan.shards, paths, strict=True):
        try:
            problems += _check_bytes(shard, path)
            problems += _check_tensors(shard, read_gguf(path))
        except QuantmillError as error:
            problems.append(error)
    return problems


def _check_bytes(shard: PlannedShard, path: Path) -> Iterator[VerifyError]:
    with files.reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        header = bytearray(min(nbytes, len(shard.header)))
        files.read_exact(fd, memoryview(header), 0, path)
    if nbytes != shard.nbytes:
        yield VerifyError(
            "the file has another length than planned",
            file=path,
            expected=f"{shard.nbytes:,} bytes",
            found=f"{nbytes:,} bytes",
        )
    if header != shard.header:
        at = next(
            (
                n
                for n, pair in enumerate(zip(header, shard.header, strict=False))
                if len({*pair}) > 1
            ),
            len(header),
        )
        yield VerifyError("the header is not the planned one", file=path, offset=at)


def _check_tensors(shard: PlannedShard, file: GgufFile) -> Iterator[VerifyError]:
    planned = {t.name: (t.target.shape, t.type.name, t.offset, t.nbytes) for t in shard.tensors}
    found = {t.name: (t.ne[::-1], t.type.name, t.offset, t.nbytes) for t in file.tensors.values()}
    for name in sorted({*planned, *found}):
        if planned.get(name) != found.get(name):
            yield VerifyError(
                "the tensor is not as planned",
                file=file.path,
                tensor=name,
                expected="shape {}, {}, offset {:,}, {:,} bytes".format(*planned[name])
                if name in planned
                else "no such tensor",
                found="shape {}, {}, offset {:,}, {:,} bytes".format(*found[name])
                if name in found
                else "no such tensor",
            )
    yield from _check_overlaps(file)


def _check_overlaps(file: GgufFile) -> Iterator[VerifyError]:
    in_order = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    for before, tensor in pairwise(in_order):
        if before.offset + before.nbytes > tensor.offset:
            yield VerifyError(
                f"the tensor begins inside {before.name}",
                file=file.path,
                tensor=tensor.name,
                expected=f"offset {before.offset + before.nbytes:,} or later",
                found=f"{tensor.offset:,}",
            )
