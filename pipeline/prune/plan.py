"""What becomes of each file of a checkpoint that loses experts: planned from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pipeline.experts.keep import KeepList, check_fits
from pipeline.experts.routing import routing_of
from pipeline.files import read_bytes
from pipeline.model.config import ModelConfig
from pipeline.prune.header import METADATA, header_bytes, stored_order
from pipeline.prune.names import FIRST_PART, expert_tensor, router_layer
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile, SourceTensor
from pipeline.source.json_object import parse_json_object
from pipeline.source.spec import TensorSpec

_LENGTH_NBYTES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file of the source."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PrunedTensor:
    """A tensor of the cut checkpoint, and the bytes that it is made of, in order."""

    spec: TensorSpec
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PrunedFile:
    """A file of the cut checkpoint.

    ``header`` None: no byte of it changes, it is the file of that name of the source. ``tensors``
    are in stored order.
    """

    name: str
    header: bytes | None
    tensors: tuple[PrunedTensor, ...]
    nbytes: int

    @property
    def is_changed(self) -> bool:
        """Whether it is another file than that of the source."""
        return self.header is not None

    @property
    def source_names(self) -> tuple[str, ...]:
        """The files of the source that it is made of."""
        spans = (span for tensor in self.tensors for span in tensor.spans)
        return tuple(sorted({self.name, *(span.file for span in spans)}))


@dataclass(frozen=True, slots=True)
class PrunedPlan:
    """All files of the cut checkpoint."""

    keep: KeepList
    files: tuple[PrunedFile, ...]

    @property
    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """File name and tensor, of all of them."""
        return ((file.name, tensor.spec) for file in self.files for tensor in file.tensors)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors, which an index calls ``total_size``."""
        return sum(spec.nbytes for _, spec in self.tensors)


def plan_pruned(checkpoint: Checkpoint, config: ModelConfig, keep: KeepList) -> PrunedPlan:
    """The files of ``checkpoint`` with the experts of ``keep`` alone.

    Of the trunk, kept experts are renumbered in the order of the list, and the routers' rows and
    biases follow them. All parts of an expert go where its first part is. Everything else, a
    draft's experts too, stays in its file as it is. Where no expert goes, no file changes.

    Args:
        checkpoint: Open, its parts agreeing.
        config: What its config.json describes.
        keep: The experts that stay.

    Raises:
        PlanError: The list does not fit the model, or the model cannot lose experts; several raise
            `Problems`.
        SourceError: A header cannot be read again.
    """
    check_fits(keep, routing_of(config))
    is_whole = keep.n_kept == keep.n_experts
    homes: dict[str, list[PrunedTensor]] = {name: [] for name in checkpoint.files}
    changed: set[str] = set()
    for file_name, tensor in _stored(checkpoint):
        cut = None if is_whole else _cut(checkpoint, file_name, tensor, keep)
        if cut is None:
            homes[file_name].append(_unchanged(file_name, tensor))
            continue
        changed.add(file_name)
        for home, pruned in cut:
            homes[home].append(pruned)
    files = (
        _changed_file(checkpoint.files[name], name, tensors)
        if name in changed
        else PrunedFile(name, None, tuple(tensors), checkpoint.files[name].nbytes)
        for name, tensors in homes.items()
        if tensors
    )
    return PrunedPlan(keep, tuple(files))


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, SourceTensor]]:
    for file_name, file in checkpoint.files.items():
        for tensor in file.tensors.values():
            yield file_name, tensor


def _unchanged(file_name: str, tensor: SourceTensor) -> PrunedTensor:
    return PrunedTensor(_spec(tensor), (Span(file_name, tensor.offset, tensor.nbytes),))


def _spec(tensor: SourceTensor) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.dtype, tensor.shape)


def _cut(
    checkpoint: Checkpoint, file_name: str, tensor: SourceTensor, keep: KeepList
) -> list[tuple[str, PrunedTensor]] | None:
    """What becomes of a tensor, and where: nothing, or one; None where experts do not touch it."""
    layer = router_layer(tensor.name)
    if layer is not None:
        return [(file_name, _router(file_name, tensor, keep.layers[layer]))]
    part = expert_tensor(tensor.name)
    if part is None:
        return None
    kept = keep.layers[part.layer]
    if part.expert not in kept:
        return []
    whole = _unchanged(file_name, tensor)
    renumbered = replace(part, expert=kept.index(part.expert)).name
    home = checkpoint.weight_map[replace(part, part=FIRST_PART).name]
    return [(home, replace(whole, spec=replace(whole.spec, name=renumbered)))]


def _router(file_name: str, tensor: SourceTensor, kept: tuple[int, ...]) -> PrunedTensor:
    """The rows of the kept experts; rows one after the other are read at once."""
    n_stored, *rest = tensor.shape
    row_nbytes = tensor.nbytes // n_stored
    runs: list[tuple[int, int]] = []
    for expert in kept:
        if runs and sum(runs[-1]) == expert:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((expert, 1))
    spans = tuple(
        Span(file_name, tensor.offset + first * row_nbytes, n * row_nbytes) for first, n in runs
    )
    return PrunedTensor(TensorSpec(tensor.name, tensor.dtype, (len(kept), *rest)), spans)


def _changed_file(source: SourceFile, name: str, tensors: list[PrunedTensor]) -> PrunedFile:
    ordered = tuple(sorted(tensors, key=lambda tensor: stored_order(tensor.spec)))
    specs = [tensor.spec for tensor in ordered]
    header = header_bytes(specs, _metadata(source))
    return PrunedFile(name, header, ordered, len(header) + sum(spec.nbytes for spec in specs))


def _metadata(source: SourceFile) -> Mapping[str, object] | None:
    """What the source's file says of itself, in its header."""
    text = read_bytes(source.path, _LENGTH_NBYTES, source.header_nbytes - _LENGTH_NBYTES)
    if METADATA.encode() not in text:
        return None
    said = parse_json_object(text, source.path, "the safetensors header").get(METADATA)
    return said if isinstance(said, dict) else None
