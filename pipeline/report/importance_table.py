"""What an importance matrix knows of a model, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.importance.coverage import Coverage, LayerCoverage
from pipeline.report.tables import Cell, Column, Format, Row, RowKind, Table
from pipeline.report.units import count

_MOST_NAMES = 6
_MOST_IDS = 6

_UNCOUNTED = (
    "This file does not say how many tokens each expert saw (the form before GGUF never does, nor "
    "does a file converted from it): only experts that saw none are known, and there is no neutral "
    "prior. A llama-imatrix that writes GGUF counts tokens."
)
_UNUSED = (
    "Entries that fit no tensor are of another layout of the experts, of a draft or of another "
    "model; they are not used."
)
_UNMEASURED = "Tensors without an entry are quantized as if there were no importance matrix."


def importance_tables(coverage: Coverage) -> tuple[Table, ...]:
    """What the matrix is, then its experts layer by layer where it knows any."""
    return (_facts(coverage), *((_layers(coverage),) if coverage.layers else ()))


def _facts(coverage: Coverage) -> Table:
    notes = (
        *((_UNUSED,) if coverage.unused else ()),
        *((_UNMEASURED,) if coverage.unmeasured else ()),
    )
    rows = tuple(map(Row, _fact_rows(coverage)))
    return Table("Importance matrix", (Column("what"), Column("")), rows, notes)


def _fact_rows(coverage: Coverage) -> Iterator[tuple[Cell, ...]]:
    matrix = coverage.matrix
    yield "file", matrix.path.name
    yield "sha256", matrix.sha256
    yield "form", "GGUF" if matrix.form == "gguf" else "the form before GGUF (.dat)"
    if matrix.datasets:
        yield "made with", ", ".join(matrix.datasets)
    if matrix.n_chunks:
        yield "chunks of text", count(matrix.n_chunks)
    if coverage.is_counted:
        yield "neutral prior", f"worth {coverage.prior:g} token{'s' * (coverage.prior != 1)}"
    yield "entries used", f"{count(coverage.n_used)} of {count(matrix.n_entries)}"
    if coverage.unused:
        yield "entries that fit no tensor", _listed(coverage.unused, _MOST_NAMES)
    if coverage.unmeasured:
        number = count(len(coverage.unmeasured))
        yield "tensors without an entry", f"{number}: {_listed(coverage.unmeasured, _MOST_NAMES)}"


def _layers(coverage: Coverage) -> Table:
    columns = (
        Column("layer"),
        Column("experts", Format.COUNT),
        Column("saw nothing", Format.COUNT),
        Column(f"below {coverage.threshold} tokens", Format.COUNT),
        Column("least", Format.COUNT),
        Column("median", Format.COUNT),
        Column("which saw nothing; below"),
    )
    body = tuple(Row(_layer_cells(layer)) for layer in coverage.layers)
    n_experts = sum(layer.n_experts for layer in coverage.layers)
    n_rare = coverage.n_rare if coverage.is_counted else None
    total = ("total", n_experts, coverage.n_unseen, n_rare, None, None, None)
    notes = () if coverage.is_counted else (_UNCOUNTED,)
    title = "Tokens that each expert saw while it was measured"
    return Table(title, columns, (*body, Row(total, RowKind.TOTAL)), notes)


def _layer_cells(layer: LayerCoverage) -> tuple[Cell, ...]:
    lists = (layer.unseen, layer.rare or ())
    who = "; ".join(_listed(ids, _MOST_IDS) or "-" for ids in lists) if any(lists) else None
    return (
        str(layer.layer),
        layer.n_experts,
        len(layer.unseen),
        None if layer.rare is None else len(layer.rare),
        layer.least,
        layer.median,
        who,
    )


def _listed(things: Sequence[object], most: int) -> str:
    shown = ", ".join(map(str, things[:most]))
    return f"{shown} and {count(len(things) - most)} more" if len(things) > most else shown
