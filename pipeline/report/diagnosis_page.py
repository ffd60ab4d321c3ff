"""A diagnosis as one page of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from pipeline.diagnosis.commands import (
    ALIKE_FILE,
    CHECKPOINT,
    CHECKPOINT_NOTE,
    RECIPE,
    RECIPE_FILE,
    RECIPE_NOTE,
)
from pipeline.diagnosis.diagnose import Diagnosis, Repair, Verdict
from pipeline.diagnosis.finding import Finding
from pipeline.diagnosis.identity import Fact, RoleRow
from pipeline.report.tables import WIDTH, Column, Format, Row, RowKind, Table, render_text

_SUMMARY = {
    Verdict.SOUND: "sound: nothing keeps an engine from loading it or makes it run wrong",
    Verdict.FAULTY: "faulty: engines refuse it or run it wrong",
    Verdict.NO_MODEL: "not a model that can be examined",
}


_NOTES = {
    f"original={CHECKPOINT}": CHECKPOINT_NOTE,
    CHECKPOINT: CHECKPOINT_NOTE,
    RECIPE: RECIPE_NOTE,
}
"""Words of a command that the reader has to fill in, and what for."""


def diagnosis_page(diagnosis: Diagnosis) -> str:
    """What it is, its bytes by role, and each finding with what mends it."""
    title = str(diagnosis.path)
    parts = [
        [title, "=" * min(len(title), WIDTH)],
        [*_facts([*diagnosis.facts, Fact("verdict", _SUMMARY[diagnosis.verdict])])],
        [render_text(role_table(diagnosis.roles)).rstrip()] if diagnosis.roles else [],
        *([*_finding(no, one)] for no, one in enumerate(diagnosis.findings, 1)),
        [*_repair(diagnosis.repair)],
        [*_alike(diagnosis.alike)],
        [*dict.fromkeys(n for word, n in _NOTES.items() if word in _commands(diagnosis).split())],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def role_table(rows: Iterable[RoleRow]) -> Table:
    """Tensors and bytes by role, with the types each is stored in."""
    body = [Row((row.title, row.n_tensors, row.nbytes, row.nbytes, _types(row))) for row in rows]
    n_tensors = sum(row.cells[1] for row in body if isinstance(row.cells[1], int))
    nbytes = sum(row.cells[2] for row in body if isinstance(row.cells[2], int))
    total = Row(("total", n_tensors, nbytes, nbytes, None), RowKind.TOTAL)
    return Table(
        "bytes by role",
        (
            Column("role"),
            Column("tensors", Format.COUNT),
            Column("bytes", Format.COUNT),
            Column("GB", Format.GB),
            Column("types (tensors)"),
        ),
        (*body, total),
    )


def _types(row: RoleRow) -> str:
    return ", ".join(f"{name} ({n:,})" for name, n in row.types.items())


def _facts(facts: Iterable[Fact]) -> Iterator[str]:
    listed = list(facts)
    width = max(len(fact.label) for fact in listed) + 2
    for fact in listed:
        yield from _wrapped(fact.value, fact.label.ljust(width), " " * width)


def _finding(number: int, finding: Finding) -> Iterator[str]:
    yield from _wrapped(f"[{finding.severity}] {finding.what.rstrip('.')}.", f"{number}. ")
    if finding.where:
        yield from _wrapped(", ".join(finding.where), "   in: ")
    if finding.engine_says:
        yield from _wrapped(f'"{finding.engine_says}"', "   engines say: ")
    if finding.mend is not None:
        where = f", see {RECIPE_FILE} below." if finding.mend.grafts else ""
        yield from _wrapped(finding.mend.what + where, "   mend: ")
        yield from (f"       {command}" for command in finding.mend.commands)


def _repair(repair: Repair | None) -> Iterator[str]:
    if repair is not None:
        yield f"{RECIPE_FILE}: what to take from the checkpoint (leave out what you do not want)"
        yield ""
        yield from (f"    {line}".rstrip() for line in repair.recipe.splitlines())
        yield ""
        yield f"    {repair.command}"


def _alike(recipe: str | None) -> Iterator[str]:
    if recipe is not None:
        yield f"{ALIKE_FILE}: the recipe that makes its like, as the types of its tensors tell it"
        yield ""
        yield from (f"    {line}".rstrip() for line in recipe.splitlines())


def _commands(diagnosis: Diagnosis) -> str:
    mends = [finding.mend for finding in diagnosis.findings if finding.mend]
    repair = [diagnosis.repair.command] if diagnosis.repair else []
    return "\n".join([*(command for mend in mends for command in mend.commands), *repair])


def _wrapped(text: str, first: str, rest: str = "      ") -> list[str]:
    # Names of files and tensors are to be copied whole.
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
