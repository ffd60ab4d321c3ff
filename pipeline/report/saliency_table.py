"""Keep lists and the scores behind them as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.experts.choice import Choice
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import keep_digest
from pipeline.experts.stability import CriteriaReport
from pipeline.report.saliency_facts import LayerFacts, SelectionFacts
from pipeline.report.saliency_words import criterion_words, label_words, place_words
from pipeline.report.tables import Cell, Column, Format, Row, Table
from pipeline.report.units import count, share

_GAP_NOTE = (
    "gap: how much the best pruned expert scores below the worst kept one. Near 0 the cut goes "
    "through a flat stretch, and other text would move it; below 0 an expert was kept whatever it "
    "scores."
)
_SPREAD_NOTE = "spread: the standard deviation of the layer's scores over their mean."


def keep_table(keep: KeepList, model: str, notes: tuple[str, ...] = ()) -> Table:
    """What a list is: how many experts of which model, and what it may be called.

    Args:
        keep: The list.
        model: What the model is called that is cut.
        notes: What a person should know before using it, in sentences.
    """
    rows = [
        ("model", f"{model}: {keep.n_layers} layers of {keep.n_experts} experts"),
        ("used by a token", str(keep.top_k)),
        ("kept", f"{keep.n_kept} in each layer ({share(keep.n_kept / keep.n_experts)})"),
        ("label", label_words(keep.honesty)),
        ("sha256 of the list", keep_digest(keep)),
    ]
    return Table("The list", (Column("what"), Column("")), tuple(map(Row, rows)), notes)


def choice_tables(keep: KeepList) -> tuple[Table, ...]:
    """How a list came about: one table for each cut, the first cut first."""
    numbered = len(keep.choices) > 1
    return tuple(
        Table(
            f"How it was chosen, cut {no}" if numbered else "How it was chosen",
            (Column("what"), Column("")),
            tuple(map(Row, _choice_rows(choice))),
        )
        for no, choice in enumerate(keep.choices, 1)
    )


def _choice_rows(choice: Choice) -> Iterator[tuple[Cell, ...]]:
    yield "experts", f"{choice.n_kept} of {choice.n_experts}"
    yield "criterion", criterion_words(choice.criterion)
    yield "label", label_words(choice.honesty)
    yield "kind of source", choice.kind
    if choice.tokens is not None:
        yield "tokens", f"{count(choice.tokens)} in the layer that saw the fewest"
    if choice.forced:
        yield "kept because a person named them", place_words(choice.forced)
    if choice.protected:
        yield "kept because a rule did", place_words(choice.protected)
    for origin in choice.origins:
        yield origin.name, f"sha256 {origin.sha256}"


def layer_table(facts: SelectionFacts) -> Table:
    """One row per layer: what was measured, and where the cut goes."""
    columns = (
        Column("layer", Format.COUNT),
        Column("tokens", Format.COUNT),
        Column("never used", Format.COUNT),
        Column("least kept score", Format.COUNT),
        Column("best pruned score", Format.COUNT),
        Column("gap", Format.SHARE),
        Column("spread", Format.SHARE),
        Column("common to both halves", Format.SHARE),
    )
    rows = tuple(Row(_layer_cells(layer)) for layer in facts.layers)
    return Table(f"Layers, by {facts.criterion}", columns, rows, (_GAP_NOTE, _SPREAD_NOTE))


def _layer_cells(one: LayerFacts) -> tuple[Cell, ...]:
    return (
        one.layer,
        one.n_tokens,
        one.n_never,
        score(one.least_kept),
        None if one.best_pruned is None else score(one.best_pruned),
        one.gap,
        one.spread,
        one.halves,
    )


def score(value: float) -> str:
    """A score with four digits that count, whatever its size."""
    return f"{value:.4g}"


def criteria_table(report: CriteriaReport, n_experts: int) -> Table:
    """Every criterion against every other: the share of experts that both keep."""
    by_chance = share(report.n_kept / n_experts)
    columns = (Column(""), *(Column(c, Format.SHARE) for c in report.criteria))
    rows = tuple(
        Row((str(criterion), *map(float, shares)))
        for criterion, shares in zip(report.criteria, report.shares, strict=True)
    )
    note = (
        f"Of {report.n_kept} kept experts, how many another criterion keeps too, mean over layers; "
        f"two lists drawn by lot would share {by_chance}."
    )
    return Table("Other criteria on the same numbers", columns, rows, (note,))


def selection_tables(facts: SelectionFacts) -> Sequence[Table]:
    """The tables of a choice by scores, after those of the list."""
    many = len(facts.criteria.criteria) > 1
    criteria = (criteria_table(facts.criteria, facts.keep.n_experts),) if many else ()
    return (layer_table(facts), *criteria)
