"""The keep list of a published pruned checkpoint, read back from its bytes.

Pruning a checkpoint leaves the rows of its routers as they were, so each row of the pruned router
is a row of the base's, and tells which expert it routes to. No score is needed, none is found out.
Tensor names are those of DeepSeek's released checkpoints.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import QuantmillError, SourceError, raise_problems
from pipeline.experts.choice import Choice
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList, shown
from pipeline.experts.origin import Origin
from pipeline.experts.routing import Routing
from pipeline.files import read_bytes
from pipeline.source.checkpoint import Checkpoint

KIND = "recovered"

_BIASES = ("bias", "bias_vl")
"""Selection biases: of text tokens, and of image tokens where the model knows them."""

_PARTS = tuple(f"{part}.{half}" for part in ("w1", "w2", "w3") for half in ("weight", "scale"))
SAMPLE_NBYTES = 1 << 16
"""Of each tensor of a sampled expert; two experts differ long before."""

ReadBytes = Callable[[Path, int, int], bytes]
"""(file, offset, nbytes) -> bytes: a local file, or a range of one elsewhere."""


@dataclass(frozen=True, slots=True)
class Router:
    """One layer's router, row by row: the weights and the biases of each expert, as bytes."""

    layer: int
    rows: tuple[bytes, ...]
    biases: tuple[bytes, ...]


def recover_keep(
    base: Checkpoint, pruned: Checkpoint, routing: Routing, *, read: ReadBytes = read_bytes
) -> KeepList:
    """Which experts of ``base`` the checkpoint ``pruned`` holds.

    Rows are matched byte for byte; equal rows are told apart by their biases and then by the bytes
    of their experts. Every match must agree in its biases, and one expert a layer in its bytes.

    Args:
        base: The checkpoint that was pruned, open.
        pruned: What is left of it, open; the order of its experts does not matter.
        routing: Of ``base``.
        read: How bytes are read, for checkpoints that lie elsewhere.

    Raises:
        SourceError: A tensor is missing or of another shape or dtype, or a row matches no expert
            or several; several raise `Problems`.
        PlanError: What was found breaks a rule of keep lists.
    """
    digest = {"base": hashlib.sha256(), "pruned": hashlib.sha256()}
    layers: list[tuple[int, ...]] = []
    problems: list[QuantmillError] = []
    for layer in range(routing.n_layers):
        whole = _router(base, layer, read)
        left = _router(pruned, layer, read)
        _check_sizes(whole, left, routing, base)
        for name, router in (("base", whole), ("pruned", left)):
            digest[name].update(b"".join((*router.rows, *router.biases)))
        try:
            layers.append(_layer(whole, left, _Experts(base, pruned, layer, read)))
        except SourceError as error:
            problems.append(error)
    raise_problems(f"routers of {pruned.folder}", problems)
    choice = Choice(
        kind=KIND,
        honesty=Honesty.RECOVERED,
        criterion=None,
        n_experts=routing.n_experts,
        n_kept=len(layers[0]),
        origins=(
            Origin(digest["base"].hexdigest(), f"routers of {base.folder.name}"),
            Origin(digest["pruned"].hexdigest(), f"routers of {pruned.folder.name}"),
        ),
    )
    return KeepList(routing.n_experts, routing.top_k, tuple(layers), (choice,))


def match_rows(whole: Router, left: Router) -> list[list[int]]:
    """For each row that is left, the experts of the whole router that it can be.

    Rows count first; where several are equal, those whose biases are equal too.
    """
    by_row: dict[bytes, list[int]] = {}
    for expert, row in enumerate(whole.rows):
        by_row.setdefault(row, []).append(expert)
    found: list[list[int]] = []
    for row, bias in zip(left.rows, left.biases, strict=True):
        alike = by_row.get(row, [])
        same_bias = [expert for expert in alike if whole.biases[expert] == bias]
        found.append(same_bias if len(alike) > 1 else alike)
    return found


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of one layer in both checkpoints."""

    base: Checkpoint
    pruned: Checkpoint
    layer: int
    read: ReadBytes

    def are_same(self, expert: int, slot: int, nbytes: int | None = None) -> bool:
        """Whether ``expert`` of the base is ``slot`` of the pruned one, by their first bytes."""
        return all(
            self._bytes(self.base, expert, part, nbytes)
            == self._bytes(self.pruned, slot, part, nbytes)
            for part in _PARTS
        )

    def _bytes(self, checkpoint: Checkpoint, number: int, part: str, nbytes: int | None) -> bytes:
        name = f"layers.{self.layer}.ffn.experts.{number}.{part}"
        file, tensor = checkpoint.locate(name)
        n = tensor.nbytes if nbytes is None else min(nbytes, tensor.nbytes)
        return self.read(file.path, tensor.offset, n)


def _layer(whole: Router, left: Router, experts: _Experts) -> tuple[int, ...]:
    """The experts of the whole router that are left, ascending."""
    ids: list[int] = []
    for slot, candidates in enumerate(match_rows(whole, left)):
        if len(candidates) > 1:
            candidates = [e for e in candidates if experts.are_same(e, slot)]
        if len(candidates) != 1:
            raise _unmatched(whole, slot, candidates, experts.pruned)
        ids.append(candidates[0])
    for slot, expert in enumerate(ids):
        if whole.biases[expert] != left.biases[slot]:
            raise SourceError(
                f"layer {whole.layer}: row {slot} of the pruned router is expert {expert}'s, "
                "but its biases are not",
                file=experts.pruned.folder,
                next_step="Router and biases were cut by different lists: do not use this one.",
            )
    slot = whole.layer % len(ids)
    if not experts.are_same(ids[slot], slot, SAMPLE_NBYTES):
        raise SourceError(
            f"layer {whole.layer}: row {slot} of the pruned router is expert {ids[slot]}'s, but "
            "the expert in that place is another",
            file=experts.pruned.folder,
            next_step="Router and experts were cut by different lists, or experts were changed.",
        )
    _refuse_twins(whole.layer, ids, experts.pruned)
    return tuple(sorted(ids))


def _refuse_twins(layer: int, ids: Sequence[int], pruned: Checkpoint) -> None:
    twins = {expert for expert in ids if ids.count(expert) > 1}
    if twins:
        raise SourceError(
            f"layer {layer}: several rows of the pruned router are the same expert's",
            file=pruned.folder,
            found=shown(twins),
        )


def _unmatched(whole: Router, slot: int, found: Sequence[int], pruned: Checkpoint) -> SourceError:
    if found:
        what = f"row {slot} of the pruned router can be several experts, alike in every byte"
        next_step = None
    else:
        what = f"row {slot} of the pruned router is no row of the base's"
        next_step = "The base is of another release, or the router was trained or merged on."
    return SourceError(
        f"layer {whole.layer}: {what}",
        file=pruned.folder,
        found=shown(found) or None,
        next_step=next_step,
    )


def _router(checkpoint: Checkpoint, layer: int, read: ReadBytes) -> Router:
    prefix = f"layers.{layer}.ffn.gate."
    file, weight = checkpoint.locate(f"{prefix}weight")
    if len(weight.shape) != 2:
        raise SourceError("a router is not a matrix", file=file.path, tensor=weight.name)
    rows = _slices(read(file.path, weight.offset, weight.nbytes), weight.shape[0])
    biases = [
        _slices(read(*place), weight.shape[0])
        for place in _bias_places(checkpoint, prefix, weight.shape[0])
    ]
    joined = tuple(b"".join(parts) for parts in zip(*biases, strict=True))
    return Router(layer, rows, joined or (b"",) * len(rows))


def _bias_places(
    checkpoint: Checkpoint, prefix: str, n_rows: int
) -> Iterator[tuple[Path, int, int]]:
    for bias in _BIASES:
        if prefix + bias in checkpoint.weight_map:
            file, tensor = checkpoint.locate(prefix + bias)
            if tensor.shape != (n_rows,):
                raise SourceError(
                    "a router's bias is not one number for each of its rows",
                    file=file.path,
                    tensor=tensor.name,
                    expected=(n_rows,),
                    found=tensor.shape,
                )
            yield file.path, tensor.offset, tensor.nbytes


def _slices(content: bytes, n: int) -> tuple[bytes, ...]:
    width = len(content) // max(n, 1)
    return tuple(content[i * width : (i + 1) * width] for i in range(n))


def _check_sizes(whole: Router, left: Router, routing: Routing, base: Checkpoint) -> None:
    if len(whole.rows) != routing.n_experts:
        raise SourceError(
            f"the base's router of layer {whole.layer} has another number of experts",
            file=base.folder,
            expected=routing.n_experts,
            found=len(whole.rows),
            next_step="Was this one pruned already? Name the released checkpoint as base.",
        )
    widths = [len(r.rows[0]) + len(r.biases[0]) if r.rows else 0 for r in (whole, left)]
    if widths[0] != widths[1]:
        raise SourceError(
            f"the routers of layer {whole.layer} are stored differently",
            expected=f"{widths[0]:,} bytes an expert, biases included",
            found=f"{widths[1]:,} bytes",
            next_step="Use checkpoints in the released form, not converted copies.",
        )
