"""Do index, shards and config.json speak of the same tensors? Checked from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.errors import SourceError
from pipeline.source import finding
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.experts import expert_findings
from pipeline.source.finding import Finding, explain
from pipeline.source.header import SourceTensor
from pipeline.source.index import INDEX_NAME
from pipeline.source.scale_block import implied_block
from pipeline.source.spec import TensorSpec

_WEIGHT = ".weight"
_SCALE = ".scale"
_SCALED = {"F8_E4M3": 1, "I8": 2}
"""Dtypes that mean nothing without scales -> weights per stored element (I8 holds two FP4)."""


def check_agreement(checkpoint: Checkpoint, expected: Sequence[TensorSpec]) -> list[SourceError]:
    """Every way in which the checkpoint differs from itself or from ``expected``.

    ``expected`` is what config.json implies. One fault gives one problem: what follows from a
    fault already found is left out, and faults of one kind and place are counted together.
    """
    held, wanted = _held(checkpoint), {spec.name: spec for spec in expected}
    findings = list(_index_findings(checkpoint, held))
    findings += expert_findings(held, wanted, _names(findings))
    findings += _spec_findings(held, wanted, _names(findings))
    problems = explain(findings, checkpoint)
    return problems or list(_total_problem(checkpoint, held.values()))


def _names(findings: Iterable[Finding]) -> set[str]:
    return {name for one in findings for name in one.names}


def _held(checkpoint: Checkpoint) -> dict[str, SourceTensor]:
    """Every stored tensor by name; of two, the one in the shard that the index says."""
    held: dict[str, SourceTensor] = {}
    for file_name, file in checkpoint.files.items():
        for name, tensor in file.tensors.items():
            if name not in held or checkpoint.weight_map.get(name) == file_name:
                held[name] = tensor
    return held


def _index_findings(checkpoint: Checkpoint, held: Mapping[str, SourceTensor]) -> Iterator[Finding]:
    listed: dict[str, list[str]] = {}
    for name, file_name in checkpoint.weight_map.items():
        listed.setdefault(file_name, []).append(name)
    for file_name, names in listed.items():
        file = checkpoint.files.get(file_name)
        if file is None:
            yield Finding(finding.MISSING_SHARD, names, file=file_name)
            continue
        for name in names:
            if name not in held:
                yield Finding(finding.PHANTOM, [name], file=INDEX_NAME, expected=file_name)
    for file_name, file in checkpoint.files.items():
        if file_name in listed:
            yield from _shard_findings(checkpoint, file_name)
        elif file.tensors:
            yield Finding(finding.UNLISTED_SHARD, list(file.tensors), file=file_name)


def _shard_findings(checkpoint: Checkpoint, file_name: str) -> Iterator[Finding]:
    """Tensors of one listed shard that the index does not place there."""
    for name in checkpoint.files[file_name].tensors:
        said = checkpoint.weight_map.get(name)
        if said == file_name:
            continue
        other = None if said is None else checkpoint.files.get(said)
        if said is None:
            yield Finding(finding.UNLISTED_TENSOR, [name], file=file_name)
        elif other is not None and name in other.tensors:
            yield Finding(finding.TWICE, [name], file=file_name, found=f"also in {said}")
        elif other is not None:
            yield Finding(finding.MOVED, [name], file=INDEX_NAME, expected=said, found=file_name)


def _spec_findings(
    held: Mapping[str, SourceTensor], expected: Mapping[str, TensorSpec], explained: set[str]
) -> Iterator[Finding]:
    absent: list[TensorSpec] = []
    for name, spec in expected.items():
        tensor = held.get(name)
        if name in explained:
            continue
        if tensor is None:
            absent.append(spec)
        elif tensor.dtype != spec.dtype:
            yield Finding(finding.WRONG_DTYPE, [name], expected=spec.dtype, found=tensor.dtype)
        elif tensor.shape != spec.shape:
            yield _shape_finding(spec, tensor, held.get(_partner(name, _SCALE, _WEIGHT)))
    yield from _absences(absent, held, expected)
    for name in held:
        if name not in expected and name not in explained:
            yield Finding(finding.UNEXPECTED, [name], group=_module(name))


def _absences(
    absent: Iterable[TensorSpec],
    held: Mapping[str, SourceTensor],
    expected: Mapping[str, TensorSpec],
) -> Iterator[Finding]:
    """Why expected tensors are not there, module by module."""
    modules: dict[str, list[TensorSpec]] = {}
    for spec in absent:
        modules.setdefault(_module(spec.name), []).append(spec)
    sizes = Counter(map(_module, expected)) if modules else Counter[str]()
    for module, specs in modules.items():
        if 1 < len(specs) == sizes[module]:
            asked = f"{len(specs):,} tensors {module}.*"
            yield Finding(finding.ABSENT, [s.name for s in specs], expected=asked, found="none")
        else:
            for spec in specs:
                yield from _absence(spec, held)


def _absence(spec: TensorSpec, held: Mapping[str, SourceTensor]) -> Iterator[Finding]:
    """Why an expected tensor is not there, told by the half of a weight/scale pair that is."""
    weight = held.get(_partner(spec.name, _SCALE, _WEIGHT))
    scale = _partner(spec.name, _WEIGHT, _SCALE)
    if weight is not None:
        if weight.dtype in _SCALED:  # else its wrong dtype is the finding
            yield Finding(finding.NO_SCALE, [weight.name], group=_module(spec.name))
    elif scale in held:
        yield Finding(finding.NO_WEIGHT, [scale], group=_module(spec.name))
    else:
        yield Finding(finding.MISSING, [spec.name], group=_module(spec.name))


def _shape_finding(spec: TensorSpec, tensor: SourceTensor, weight: SourceTensor | None) -> Finding:
    if weight is not None and len(weight.shape) == 2 and weight.dtype in _SCALED:
        size = (weight.shape[0], weight.shape[1] * _SCALED[weight.dtype])
        wanted, given = implied_block(*size, spec.shape), implied_block(*size, tensor.shape)
        if wanted and wanted != given:
            return Finding(
                finding.SCALE_BLOCK,
                [spec.name],
                expected=f"{wanted[0]}x{wanted[1]} (config.json)",
                found=f"{given[0]}x{given[1]} (its shape)" if given else f"shape {tensor.shape}",
            )
    return Finding(finding.WRONG_SHAPE, [spec.name], expected=spec.shape, found=tensor.shape)


def _partner(name: str, suffix: str, other: str) -> str:
    """``name`` with ``suffix`` turned into ``other``; empty when it does not end so."""
    return name.removesuffix(suffix) + other if name.endswith(suffix) else ""


def _module(name: str) -> str:
    """What a tensor belongs to, for counting faults together: ``layers.7``, ``mtp.0``."""
    return ".".join(name.split(".")[:2])


def _total_problem(
    checkpoint: Checkpoint, tensors: Iterable[SourceTensor]
) -> Iterator[SourceError]:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if checkpoint.total_size not in (None, nbytes):
        yield SourceError(
            "the index gives another total than the shards hold",
            file=checkpoint.path(INDEX_NAME),
            expected=f"total_size {checkpoint.total_size:,} bytes",
            found=f"{nbytes:,} bytes of tensors",
            next_step="Fetch the index of the same revision as the shards.",
        )
