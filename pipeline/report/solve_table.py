"""What a budget was spent on: tables of a solved budget, and the same as comments in its recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pipeline.report.tables import WIDTH, Column, Format, Row, RowKind, Table, render_text
from pipeline.report.units import scale_for, share
from pipeline.solve.candidates import Group
from pipeline.solve.choose import Answer
from pipeline.solve.frontier import Frontier, GroupAnswer, Neighbour, Step
from pipeline.solve.question import Question

MOST_ROWS = 60
"""Groups that a terminal is shown; tensor by tensor there are hundreds."""

_MOST_NAMED = 6

_LEGEND = (
    "error: relative root mean square error of a sample. of sum: its part of the sum. Next smaller "
    "and larger: bytes, and the sum's change in parts of it."
)


def limits_table(question: Question, answer: Answer) -> Table:
    """Every limit and what the choice takes of it."""
    rows = [
        Row((limit.title, limit.nbytes, used, limit.nbytes - used))
        for limit, used in zip(question.limits, answer.used, strict=True)
    ]
    columns = (
        Column("limit"),
        Column("at most", Format.COUNT),
        Column("used", Format.COUNT),
        Column("left", Format.COUNT),
    )
    return Table("Limits of the budget", columns, tuple(rows))


def groups_table(
    groups: Sequence[GroupAnswer], question: Question, answer: Answer, *, most: int | None = None
) -> Table:
    """What every group got, and what its next smaller and next larger type would change.

    ``most``: only so many rows, those with the largest part of the error first.
    """
    total, fixed = question.error(answer.types), question.fixed_error()
    order = list(groups)
    if most is not None and len(order) > most:
        order = sorted(order, key=lambda one: -one.error)[:most]
    rows = [
        Row(
            (
                one.group.title,
                one.type.name,
                one.nbytes,
                share(one.rmse),
                _part(one.error, total),
                _neighbour(one.smaller, total),
                _neighbour(one.larger, total),
            )
        )
        for one in order
    ]
    nbytes = sum(one.nbytes for one in groups)
    left_out = f" {len(groups) - len(order):,} groups are not shown." * (len(order) < len(groups))
    columns = (
        Column("group"),
        Column("type"),
        Column("bytes", Format.COUNT),
        Column("error"),
        Column("of sum"),
        Column("next smaller"),
        Column("next larger"),
    )
    found = (
        f"The sum that was made least is {total:.6g} ({question.objective}), of which "
        f"{fixed:.3g} is in tensors whose type was fixed; {proof(answer)}.{left_out}"
    )
    notes = (found, _LEGEND, *refused_sentences([one.group for one in groups]))
    total_row = Row(("all that was free", "", nbytes, "", "", "", ""), RowKind.TOTAL)
    return Table("What the budget was spent on", columns, (*rows, total_row), notes)


def proof(answer: Answer) -> str:
    """Whether anything better is possible, in words."""
    if answer.picks.is_proved:
        return "proved: no choice within the limits has a smaller one"
    known = "the solver knows no better one" if answer.picks.is_done else "the search was cut short"
    return f"{known}, and none is smaller by more than {100 * answer.picks.gap:.2g} %"


def refused_sentences(groups: Sequence[Group]) -> tuple[str, ...]:
    """Types that the budget allows and a rule does not, each reason once, with its groups."""
    titles: dict[str, list[str]] = {}
    for group in groups:
        for _, why in group.refused:
            titles.setdefault(why, []).append(group.title)
    return tuple(
        f"Not to choose from ({', '.join(named[:_MOST_NAMED])}"
        + (f" and {len(named) - _MOST_NAMED:,} more" if len(named) > _MOST_NAMED else "")
        + f"): {why}."
        for why, named in titles.items()
    )


def next_sentence(frontier: Frontier, question: Question, answer: Answer) -> str:
    """What a little more of the limit that decides would buy, in lines of `WIDTH`."""
    title = question.limits[frontier.axis].title
    step = frontier.next
    if step is None:
        return f"A little more of the limit on {title} would buy nothing."
    total = question.error(answer.types)
    part = _part(step.error, total)
    return textwrap.fill(
        f"The next {_size(step.nbytes)} of the limit on {title} would take {part} off the sum: "
        f"{_changes(step)}.",
        WIDTH,
    )


def as_comments(tables: Sequence[Table], sentence: str) -> str:
    """Tables and a sentence as TOML comments."""
    lines = "\n".join(render_text(table) for table in tables).splitlines()
    lines += ["", *sentence.splitlines()]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _changes(step: Step) -> str:
    told = [f"{g.title} {a.name} -> {b.name}" for g, a, b in step.changes[:_MOST_NAMED]]
    more = len(step.changes) - len(told)
    return ", ".join(told) + (f" and {more:,} more" if more else "")


def _neighbour(other: Neighbour | None, total: float) -> str:
    if other is None:
        return ""
    change = f"{100 * other.error / total:+.2f} %" if total else "0 %"
    return f"{other.type.name} {_size(other.nbytes, signed=True)} {change}"


def _size(nbytes: int, *, signed: bool = False) -> str:
    scale = scale_for(abs(nbytes))
    sign = "" if not signed else "-" if nbytes < 0 else "+"
    return f"{sign}{scale.decimal(abs(nbytes), 2)} {scale.name}"


def _part(error: float, total: float) -> str:
    return share(error / total) if total else share(0.0)
