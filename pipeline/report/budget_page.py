"""The byte budget as one page: for people who read a model's folder, and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.budget import Budget, Item, NotCarried
from pipeline.model.config import ModelConfig
from pipeline.model.engines import engines_sentence
from pipeline.model.roles import ROLE_TITLES, Role
from pipeline.plan import Plan
from pipeline.report.budget_report import budget_tables
from pipeline.report.engram_reads import engram_reads, engram_reads_table
from pipeline.report.expert_table import expert_table
from pipeline.report.launch import launch_lines
from pipeline.report.planner_table import planner_table
from pipeline.report.tables import Table, render_markdown
from pipeline.report.units import both, count


def all_tables(
    steps: Sequence[Budget],
    config: ModelConfig,
    not_carried: Sequence[NotCarried] = (),
    *,
    items: Sequence[Item] = (),
) -> tuple[Table, ...]:
    """The tables of `budget_tables`, then those of `named_tables`."""
    return (*budget_tables(steps, config, not_carried), *named_tables(items, config))


def named_tables(items: Sequence[Item], config: ModelConfig) -> tuple[Table, ...]:
    """What is told by the names of the target tensors: planner roles, experts, engram reads."""
    items = [item for item in items if item.role is not Role.DRAFT]
    if not items:
        return ()
    tables = (planner_table(items), expert_table(items, config))
    reads = engram_reads(items, config.engram) if config.engram else ()
    if config.engram is None or not reads:
        return tables
    return (*tables, engram_reads_table(reads, config.engram))


def budget_markdown(
    name: str,
    plans: Sequence[Plan],
    tables: Sequence[Table],
    not_carried: Sequence[NotCarried] = (),
    *,
    chart: str | None = None,
) -> str:
    """One Markdown page.

    Args:
        name: What the page is about: the output's name.
        plans: Its files.
        tables: The sections, in order.
        not_carried: What the files leave out.
        chart: Name of a picture that lies beside the page.
    """
    intro = [
        f"# Byte budget of {name}",
        "\n".join(f"- `{plan.name}`: **{plan.form}**, {_read_by(plan)}." for plan in plans),
        *_launch(plans),
        *_left_out(not_carried),
        *([f"![Bytes by role and step]({chart})"] if chart else []),
    ]
    sections = [render_markdown(table, level=2) for table in tables]
    return "\n\n".join(intro) + "\n\n" + "\n".join(sections)


def _read_by(plan: Plan) -> str:
    return engines_sentence(plan.form, (tensor.type for tensor in plan.tensors))


def _launch(plans: Sequence[Plan]) -> list[str]:
    return [f"{line.engine}:\n\n    {line}" for line in launch_lines(plans)]


def _left_out(not_carried: Sequence[NotCarried]) -> list[str]:
    if not not_carried:
        return []
    lines = [
        f"- {ROLE_TITLES[part.role]}: {count(part.n_tensors)} tensors, "
        f"{count(part.nbytes)} bytes = {both(part.nbytes)}"
        for part in not_carried
    ]
    return ["Not carried into these files (bytes as in the checkpoint):", "\n".join(lines)]
