"""Who reads whose compressed rows: the rules between layers that a loader checks while it walks up.

A layer of V4.1 that compresses (ratio above 0) reads the rows of the last kv source at or below it,
and the picks of the last index source. Sources: llama.cpp src/models/deepseek41.cpp and its review
(pull request 31137); each rule broken once in a running engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.errors import FormatError
from pipeline.model.contract.sizes import Sizes
from pipeline.model.metadata.header_keys import HeaderKeys


def check_sources(sizes: Sizes) -> Iterator[FormatError]:
    """A problem for each layer whose source is missing, or compressed otherwise than it reads."""
    if len(sizes.ratios) < sizes.n_layers:
        return
    yield from _check_list("kv source", sizes.kv_sources, sizes)
    yield from _check_list("index source", sizes.index_sources, sizes)
    for layer, ratio in enumerate(sizes.ratios[: sizes.n_layers]):
        if ratio:
            yield from _check_reader(layer, ratio, sizes)


def _check_list(what: str, layers: Sequence[int], sizes: Sizes) -> Iterator[FormatError]:
    if list(layers) != sorted(set(layers)) or any(not 0 <= n < sizes.n_layers for n in layers):
        yield FormatError(
            f"the {what} layers are no increasing layer numbers",
            expected=f"0 to {sizes.n_layers - 1}",
            found=list(layers),
        )
        return
    for layer in layers:
        if not sizes.ratios[layer]:
            yield FormatError(
                f"layer {layer} is a {what} but compresses nothing",
                expected="a compress ratio above 0",
                found=0,
            )


def _check_reader(layer: int, ratio: int, sizes: Sizes) -> Iterator[FormatError]:
    source = _last(sizes.kv_sources, layer)
    if source is None:
        yield FormatError(
            f"layer {layer} reads a compressed stream before any layer publishes one",
            expected=f"a kv source at or below layer {layer}",
            found=f"kv sources {list(sizes.kv_sources)}",
        )
    elif sizes.ratios[source] != ratio:
        yield FormatError(
            f"layer {layer} compresses at ratio {ratio} but reads layer {source}, "
            f"compressed at {sizes.ratios[source]}"
        )
    if _last(sizes.index_sources, layer) is None:
        yield FormatError(
            f"layer {layer} reads picked rows before any layer picks them",
            expected=f"an index source at or below layer {layer}",
            found=f"index sources {list(sizes.index_sources)}",
        )


def _last(sources: Sequence[int], layer: int) -> int | None:
    """The source that ``layer`` reads."""
    return max((source for source in sources if 0 <= source <= layer), default=None)


def check_candidates(keys: HeaderKeys, sizes: Sizes) -> Iterator[FormatError]:
    """The two-level selection: its source is an index source, its followers compress alike."""
    name = "attention.indexer.candidate_source_layer"
    source = keys.find_number(name)
    if source is None:
        return
    if source not in sizes.index_sources:
        yield FormatError(
            f"{keys.full(name)} is no index source",
            expected=f"one of {list(sizes.index_sources)}",
            found=source,
            next_step="A negative layer switches the candidate mask off without a word.",
        )
        return
    ratios = dict(enumerate(sizes.ratios))
    for layer in sizes.index_sources:
        if layer > source and ratios.get(layer) != ratios.get(source):
            yield FormatError(
                f"layer {layer} takes candidates from layer {source} but compresses at another "
                "ratio",
                expected=ratios.get(source),
                found=ratios.get(layer),
            )
