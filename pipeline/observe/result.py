"""What an observation leaves: a saliency file that says how it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.experts.accumulate import LayerSums, table_of
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.canonical import write_saliency
from pipeline.experts.origin import Origin
from pipeline.experts.saliency import SaliencyTable
from pipeline.observe.sequences import Sequences

KIND = "observed"
"""What made the numbers, as saliency tables say it: this room."""

LayerHalves = Sequence[tuple[LayerSums, LayerSums]]


def write_result(
    path: Path,
    halves: LayerHalves,
    sequences: Sequences,
    name: str,
    provenance: Mapping[str, object],
) -> SaliencyTable:
    """Write the sums of all layers under ``path``; gives their table.

    The text is the origin of the table: two observations of one text cannot be added up. Halves
    are kept where there are two sequences or more.

    Args:
        path: Where to.
        halves: For each layer, the sums of even and of odd sequences.
        sequences: What was read.
        name: What people call the text.
        provenance: What else is known of the measurement.

    Raises:
        SourceError: A sum is no number, or contradicts another: the weights or the pass are wrong.
        OutputError: It cannot be written.
    """
    origin = Origin(sequences.sha256, name)

    def table(sums: Sequence[LayerSums], n_tokens: int) -> SaliencyTable:
        counts = [n_tokens] * len(sums)
        return table_of(sums, counts, kind=KIND, honesty=Honesty.TRUE_GATE, origins=(origin,))

    whole = table([one + other for one, other in halves], sequences.n_tokens)
    of_halves = (
        (
            table([one for one, _ in halves], sum(sequences.lengths[0::2])),
            table([other for _, other in halves], sum(sequences.lengths[1::2])),
        )
        if len(sequences.lengths) > 1
        else None
    )
    write_saliency(path, whole, halves=of_halves, provenance=provenance)
    return whole
