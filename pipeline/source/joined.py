"""Several checkpoints as one, in which some tensors are taken from another source.

Names of the other sources' files and tensors begin with a label, so that two sources may use the
same names. Labels are made by the program, not by people: they stand in what a shard's digest is
taken of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile
from pipeline.source.spec import MatrixRef


def joined(first: Checkpoint, others: Mapping[str, Checkpoint]) -> Checkpoint:
    """``first`` with the files and tensors of ``others`` under their labels beside its own.

    What describes the whole (folder, config, digests) stays that of ``first``.
    """
    parts = [labelled_checkpoint(other, label) for label, other in others.items()]
    files, weight_map = dict(first.files), dict(first.weight_map)
    for part in parts:
        files |= part.files
        weight_map |= part.weight_map
    total_size = None if parts else first.total_size
    return replace(first, files=files, weight_map=weight_map, total_size=total_size)


def labelled_checkpoint(checkpoint: Checkpoint, label: str) -> Checkpoint:
    """``checkpoint`` with ``label`` in front of every name."""
    return replace(
        checkpoint,
        files={
            labelled_name(name, label): _labelled_file(file, label)
            for name, file in checkpoint.files.items()
        },
        weight_map={
            labelled_name(name, label): labelled_name(file, label)
            for name, file in checkpoint.weight_map.items()
        },
    )


def labelled(matrix: MatrixRef, label: str) -> MatrixRef:
    """``matrix`` as a checkpoint with labelled names holds it."""
    scale = None if matrix.scale is None else labelled_name(matrix.scale, label)
    return replace(matrix, weight=labelled_name(matrix.weight, label), scale=scale)


def labelled_name(name: str, label: str) -> str:
    """A file's or a tensor's name behind its label."""
    return f"{label}:{name}"


def _labelled_file(file: SourceFile, label: str) -> SourceFile:
    """Only the keys change: a message is to name the tensor as it stands in the file."""
    return replace(file, tensors={labelled_name(n, label): t for n, t in file.tensors.items()})
