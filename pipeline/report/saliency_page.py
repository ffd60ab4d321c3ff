"""A keep list as one page: what it may be called, where it came from, what to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.experts.keep import KeepList
from pipeline.report.saliency_facts import SelectionFacts
from pipeline.report.saliency_table import choice_tables, keep_table, selection_tables
from pipeline.report.tables import Table, render_markdown


def selection_markdown(facts: SelectionFacts, model: str, pictures: Mapping[str, str]) -> str:
    """The page of a list that was chosen by scores.

    Args:
        facts: The choice.
        model: What the model is called that is cut.
        pictures: Title -> name of a picture that lies beside the page.
    """
    return keep_markdown(facts.keep, model, facts.notes, selection_tables(facts), pictures)


def keep_markdown(
    keep: KeepList,
    model: str,
    notes: tuple[str, ...],
    tables: Sequence[Table] = (),
    pictures: Mapping[str, str] | None = None,
) -> str:
    """The page of any list.

    Args:
        keep: The list.
        model: What the model is called that is cut.
        notes: What a person should know before using it, in sentences.
        tables: Further sections.
        pictures: Title -> name of a picture that lies beside the page.
    """
    shown = [f"![{title}]({name})" for title, name in (pictures or {}).items()]
    parts = [
        f"# {keep.n_kept} of {keep.n_experts} experts in each of {keep.n_layers} layers",
        *(["\n".join(f"- {note}" for note in notes)] if notes else []),
        *shown,
    ]
    sections = (keep_table(keep, model), *choice_tables(keep), *tables)
    rendered = [render_markdown(table, level=2) for table in sections]
    return "\n\n".join(parts) + "\n\n" + "\n".join(rendered)
