"""The same bytes in the placement planner's own roles.

The planner (midagedev/bloomery, docs/research/v41-placement) sorts tensors into eleven classes that
follow how they are placed and read. They cut across the five roles of a recipe, so both are shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeline.budget import Item
from pipeline.model.roles import Role
from pipeline.report.tables import Column, Format, Row, RowKind, Table
from pipeline.report.units import both, count

_RULES = (
    (r"token_embd", "token_embd"),
    (r"output_hc", "hc"),
    (r"output", "head"),
    (r"engram_embd|per_layer_token_embd", "engram_table"),
    (r"engram_", "engram_dense"),
    (r"hc_", "hc"),
    (r"ffn_gate_inp|ffn_gate_tid2eid|exp_probs_b\.", "router"),
    (r"exp_probs_b_vl", "unused_vl"),
    (r".*_shexp\.weight$", "shexp"),
    (r".*_exps", "routed"),
    (r"ffn_norm", "ffn_norm"),
    (r"attn|indexer", "attn"),
)
"""Patterns for the start of a name without ``blk.N.``; the first that matches wins.

`per_layer_token_embd` is ours: the planner was written for files with a table per layer.
"""

PLANNER_ROLES = tuple(dict.fromkeys(role for _, role in _RULES))
"""The planner's roles, in its order."""


def planner_role_of(name: str) -> str:
    """The planner's role for a target tensor by its GGUF name.

    Raises:
        KeyError: No rule knows the name.
    """
    rest = re.sub(r"^blk\.\d+\.", "", name)
    for rule, role in _RULES:
        if re.match(rule, rest):
            return role
    raise KeyError(name)


def by_planner_role(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Target tensors by the planner's roles, in its order; roles without tensors are left out."""
    groups: dict[str, list[Item]] = {role: [] for role in PLANNER_ROLES}
    for item in items:
        groups[planner_role_of(item.name)].append(item)
    return {role: group for role, group in groups.items() if group}


def planner_table(items: Sequence[Item]) -> Table:
    """Tensors, bytes and bytes read per token of target tensors, by the planner's roles."""
    groups = by_planner_role(items)
    body = [_row(role, group, RowKind.BODY) for role, group in groups.items()]
    columns = (
        Column("planner role"),
        Column("tensors", Format.COUNT),
        Column("bytes", Format.COUNT),
        Column("GB", Format.GB),
        Column("GiB", Format.GIB),
        Column("read per token", Format.COUNT),
    )
    total = _row("total", items, RowKind.TOTAL)
    return Table("Bytes by planner role", columns, (*body, total), (_dense_note(groups),))


def _row(title: str, items: Sequence[Item], kind: RowKind) -> Row:
    size = sum(item.nbytes for item in items)
    per_token = sum(item.per_token for item in items)
    return Row((title, len(items), size, size, size, per_token), kind)


def _dense_note(groups: Mapping[str, Sequence[Item]]) -> str:
    """The two sums that resident-memory estimates start from."""
    apart = {"token_embd", "engram_table", "routed"}
    dense = [item for role, group in groups.items() if role not in apart for item in group]
    with_engram = sum(item.per_token for item in dense)
    without = sum(item.per_token for item in dense if item.role is not Role.ENGRAM)
    note = (
        "Read whole for every token (neither expert nor looked-up row): "
        f"{count(with_engram)} bytes = {both(with_engram)}"
    )
    if with_engram == without:
        return f"{note}."
    return (
        f"{note}; without the engram's own projections and gates {count(without)} bytes = "
        f"{both(without)}."
    )
