"""README.md of a cut checkpoint: what it is, how it was chosen, what may be said of it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.experts.keep import KeepList
from pipeline.experts.notes import count_notes, label_notes
from pipeline.report.saliency_table import choice_tables, keep_table
from pipeline.report.saliency_words import is_reap
from pipeline.report.tables import Table, render_markdown


def pruned_card(keep: KeepList, model: str, bytes_table: Table, left_out: Sequence[str]) -> str:
    """The page.

    Args:
        keep: The list by which the first model became this one.
        model: What the first model is called.
        bytes_table: Bytes before and after.
        left_out: What lay beside the source and was not taken along.
    """
    notes = (*count_notes(keep.n_kept), *label_notes(keep.honesty))
    parts = [
        f"# {model}, {keep.n_kept} of {keep.n_experts} experts",
        _what(keep, model),
        _claim(keep),
        "\n".join(f"- {note}" for note in notes),
        _files(left_out),
    ]
    tables = (bytes_table, keep_table(keep, model), *choice_tables(keep))
    sections = [render_markdown(table, level=2) for table in tables]
    return "\n\n".join(filter(None, parts)) + "\n\n" + "\n".join(sections)


def _what(keep: KeepList, model: str) -> str:
    return (
        f"{model} without {keep.n_experts - keep.n_kept} of the {keep.n_experts} routed experts in "
        f"each of its {keep.n_layers} layers, in the released form. Nothing was trained, merged or "
        "quantized: what is left has the bytes of the original. Kept experts are renumbered in "
        "their old order; routers and their biases have lost the same entries; config.json says "
        f"{keep.n_kept}. The draft's experts, the engram, vision and all else are as they were."
    )


def _files(left_out: Sequence[str]) -> str:
    lacking = f" Not taken along: {', '.join(left_out)}." if left_out else ""
    return (
        "`keep.json` lists the experts by their ids in the original; "
        f"`sha256sum --check SHA256SUMS` checks the files.{lacking}"
    )


def _claim(keep: KeepList) -> str:
    """Whether the list may be called REAP."""
    if all(map(is_reap, keep.choices)):
        return "The experts were chosen by REAP (arXiv 2510.13999) with the model's own gates."
    return (
        "**Not to be called REAP** (arXiv 2510.13999) by what is known of the list: see its "
        "criterion and label below."
    )
