"""What one expert takes: the stride by which a placement moves experts between devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from pipeline.budget import Item
from pipeline.model.config import ModelConfig
from pipeline.model.roles import Role, SubRole
from pipeline.report.tables import Cell, Column, Format, Row, RowKind, Table

_STACKS = (SubRole.ROUTED_GATE, SubRole.ROUTED_UP, SubRole.ROUTED_DOWN)


def expert_table(items: Sequence[Item], config: ModelConfig) -> Table:
    """One row per run of layers whose expert stacks have the same types.

    Expert ``e`` of a stack starts ``e`` times the stack's own stride after the stack.
    """
    layers = _stacks_by_layer(items)
    runs = groupby(sorted(layers), key=lambda layer: [stack.type for stack in layers[layer]])
    body = [_row([(layer, layers[layer]) for layer in run], config) for _, run in runs]
    routed = [item for item in items if item.role is Role.ROUTED]
    sums = (sum(item.nbytes for item in routed), sum(item.per_token for item in routed))
    total = Row(("total", len(layers), *(None,) * 4, *sums, None), RowKind.TOTAL)
    columns = (
        Column("layers"),
        Column("n", Format.COUNT),
        Column("bytes per expert", Format.COUNT),
        Column("gate", Format.COUNT),
        Column("up", Format.COUNT),
        Column("down", Format.COUNT),
        Column("all experts", Format.COUNT),
        Column("read per token", Format.COUNT),
        Column("types"),
    )
    return Table(f"Routed experts: {config.n_experts} a layer", columns, (*body, total))


def _stacks_by_layer(items: Sequence[Item]) -> dict[int, list[Item]]:
    """Gate, up and down stack of every layer that has experts."""
    layers: dict[int, list[Item]] = {}
    stacks = [item for item in items if item.sub_role in _STACKS]
    for item in sorted(stacks, key=lambda item: _STACKS.index(item.sub_role)):
        found = re.match(r"blk\.(\d+)\.", item.name)
        assert found, item.name
        layers.setdefault(int(found[1]), []).append(item)
    return layers


def _row(run: Sequence[tuple[int, Sequence[Item]]], config: ModelConfig) -> Row:
    first, last = run[0][0], run[-1][0]
    stacks = run[0][1]
    strides = [
        next((stack.nbytes // config.n_experts for stack in stacks if stack.sub_role is part), 0)
        for part in _STACKS
    ]
    everything = [stack for _, stacks_of in run for stack in stacks_of]
    cells: tuple[Cell, ...] = (
        f"{first}-{last}" if last > first else str(first),
        len(run),
        sum(strides),
        *strides,
        sum(stack.nbytes for stack in everything),
        sum(stack.per_token for stack in everything),
        ", ".join(stack.type for stack in stacks),
    )
    return Row(cells)
