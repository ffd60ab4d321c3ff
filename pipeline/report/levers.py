"""The lever table: what a machine with some VRAM and more RAM makes of a file, by the plan's bytes.

The model is public (midagedev/rig-log): whole layers of experts fill what the dense part, the KV
cache and the reserves leave of VRAM, the other experts are read from RAM, and a token takes the
time of these reads and a constant one. Sizes come from plans; everything else is a projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.budget import budget_of, plan_items
from pipeline.errors import PlanError
from pipeline.model.roles import ReadMode, Role
from pipeline.plan import Plan
from pipeline.report.tables import Column, Format, Row, Table
from pipeline.report.units import GB, gigabytes


@dataclass(frozen=True, slots=True)
class Machine:
    """What experts compete with in VRAM, and what a token costs.

    Args:
        name: What reports call it.
        vram_nbytes: Usable VRAM of all cards.
        kv_nbytes: Of it, for the KV cache.
        reserve_nbytes: Of it, for compute buffers, contexts and margins.
        dense_nbytes: Of it, for what every token reads whole; None takes it from each plan.
        bandwidth: Bytes per second at which experts are read from RAM.
        constant_s: Seconds per token that do not depend on where experts are.
    """

    name: str
    vram_nbytes: int
    kv_nbytes: int
    reserve_nbytes: int
    dense_nbytes: int | None
    bandwidth: float
    constant_s: float


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("assumed", 72 * GB, 6 * GB, 0, 4 * GB, 64.8e9, 10.0e-3),
        Machine("measured", 76_300_000_000, 110_000_000, 8_140_000_000, None, 79.8e9, 9.9e-3),
    )
}
"""One machine twice (48 and 24 GiB of VRAM, 251 GiB of RAM), after midagedev/rig-log.

``assumed`` is what its lever table was made with: round numbers, and a bandwidth taken from another
model. ``measured`` corrects it: usable bytes, KV cache at 32k tokens, compute buffers (7.07 GB) and
contexts (1.07 GB) as they are, and the bandwidth of this model's own runs.
"""


@dataclass(frozen=True, slots=True)
class Lever:
    """One file, as planned or as it might be.

    Args:
        recipe: The recipe that is planned, or that ``what_if`` starts from.
        what_if: What no plan says: empty for a file as planned.
        n_layers: Layers with routed experts.
        n_weights: Weights of all routed experts.
        store_nbytes: Bytes of all routed experts.
        file_nbytes: Bytes of all tensors of the target.
        read_nbytes: Bytes of routed experts that a token reads, wherever they are.
        dense_nbytes: Bytes of the tensors that every token reads whole.
    """

    recipe: str
    what_if: str
    n_layers: int
    n_weights: int
    store_nbytes: int
    file_nbytes: int
    read_nbytes: float
    dense_nbytes: int


@dataclass(frozen=True, slots=True)
class Projection:
    """What a machine makes of a file: layers of experts in VRAM, RAM bytes and speed of a token."""

    n_layers: float
    ram_nbytes: float
    tokens_per_s: float


def planned(recipe: str, plan: Plan, what_if: str = "") -> Lever:
    """The file that ``plan`` makes; ``what_if`` says what about the plan is only supposed.

    Raises:
        PlanError: It has no routed experts: it is a draft.
    """
    budget = budget_of("plan", plan_items(plan))
    experts = budget.line(Role.ROUTED)
    if experts is None:
        raise PlanError(f"the plan of {recipe} has no routed experts to place")
    whole = [t.nbytes for t in plan.tensors if t.target.read_mode is ReadMode.FULL]
    return Lever(
        recipe=recipe,
        what_if=what_if,
        n_layers=plan.config.n_layers,
        n_weights=experts.n_params,
        store_nbytes=experts.nbytes,
        file_nbytes=budget.nbytes,
        read_nbytes=experts.per_token,
        dense_nbytes=sum(whole),
    )


def with_fewer_used(lever: Lever, n_used: int, of: int) -> Lever:
    """The same file where a token uses ``n_used`` experts and not ``of`` (ik_llama.cpp's -ser)."""
    return replace(lever, what_if=f"-ser {n_used}", read_nbytes=lever.read_nbytes * n_used / of)


def with_mean_bpw(lever: Lever, bpw: float) -> Lever:
    """The same file with experts of ``bpw`` bits per weight on average, all else as it is."""
    store = round(lever.n_weights * bpw / 8)
    return replace(
        lever,
        what_if=f"experts at {bpw:g} bpw",
        store_nbytes=store,
        file_nbytes=lever.file_nbytes - lever.store_nbytes + store,
        read_nbytes=lever.read_nbytes * store / lever.store_nbytes,
    )


def project(lever: Lever, machine: Machine) -> Projection:
    """What ``machine`` makes of ``lever``: at best all layers lie in VRAM, at worst none."""
    dense = lever.dense_nbytes if machine.dense_nbytes is None else machine.dense_nbytes
    left = machine.vram_nbytes - dense - machine.kv_nbytes - machine.reserve_nbytes
    share = min(max(left / lever.store_nbytes, 0.0), 1.0)
    ram_nbytes = lever.read_nbytes * (1 - share)
    seconds = ram_nbytes / machine.bandwidth + machine.constant_s
    return Projection(share * lever.n_layers, ram_nbytes, 1 / seconds)


_COLUMNS = (
    Column("recipe"),
    Column("what if"),
    Column("expert store GB", Format.GB),
    Column("expert bpw", Format.BITS),
    Column("file GB", Format.GB),
    Column("layers in VRAM", Format.DECIMAL),
    Column("RAM GB/token", Format.GB),
    Column("tokens/s", Format.DECIMAL),
)


def lever_table(levers: Sequence[Lever], machine: Machine) -> Table:
    """One row per lever. Store and file are bytes; what follows them is a projection."""
    rows = [_row(lever, project(lever, machine)) for lever in levers]
    return Table(
        f"Levers, projected for the machine as {machine.name}",
        _COLUMNS,
        tuple(rows),
        (_formula(machine), *_notes(levers)),
    )


def _row(lever: Lever, projection: Projection) -> Row:
    return Row(
        (
            lever.recipe,
            lever.what_if,
            lever.store_nbytes,
            lever.store_nbytes * 8 / lever.n_weights,
            lever.file_nbytes,
            projection.n_layers,
            round(projection.ram_nbytes),
            projection.tokens_per_s,
        )
    )


def _formula(machine: Machine) -> str:
    dense = (
        "what every token reads whole, as planned"
        if machine.dense_nbytes is None
        else f"{gigabytes(machine.dense_nbytes)} GB for what every token reads whole"
    )
    return (
        "Layers, RAM and tokens/s are projections, not measurements. VRAM "
        f"{gigabytes(machine.vram_nbytes)} GB, less {dense}, {gigabytes(machine.kv_nbytes)} GB of "
        f"KV cache and {gigabytes(machine.reserve_nbytes)} GB of reserve, holds experts of mean "
        f"size; the rest is read from RAM at {machine.bandwidth / GB:g} GB/s, and a token takes "
        f"{machine.constant_s * 1e3:g} ms besides."
    )


def _notes(levers: Sequence[Lever]) -> tuple[str, ...]:
    store = (
        "Expert store: all routed experts. File: all tensors of the target; headers (some MB) and "
        "a draft come on top."
    )
    supposed = (
        'Rows with a "what if" are hypothetical: no such file is planned. The first column says '
        "what they start from; what they cost in quality is not in this table."
    )
    return (store, supposed) if any(lever.what_if for lever in levers) else (store,)
