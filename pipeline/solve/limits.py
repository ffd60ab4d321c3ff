"""Limits of bytes, and what each tensor takes of them.

A machine's limits follow from how these models are run: matrices that every token passes lie in the
memory of the GPUs, experts in what that leaves and in RAM, looked-up embedding rows in RAM, engram
tables on the drive. With ``vram`` and ``ram`` what is left of both after the reserves (context,
compute buffers, the system), and D, S, E the bytes of dense tensors, expert stacks and embedding:

    D         <= vram               nothing dense is left to the processor
    D + S + E <= vram + ram         what VRAM has left takes experts, RAM the rest

A machine without one of the two has only the other line, and one with a drive has the files there.
Experts move in whole stacks, so up to one layer less may fit than the sum says. The draft's file
counts among the files, but not in the memories: leave room for it in the reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.gguf.header import padded
from pipeline.model.config import ModelConfig
from pipeline.model.roles import ReadMode, Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.plan import per_token_nbytes
from pipeline.recipe.budget_table import BudgetTable, Machine

Cost = Callable[[TargetTensor, int], int]
"""A tensor and its bytes -> what it takes of a limit."""


@dataclass(frozen=True, slots=True)
class Limit:
    """At most ``nbytes`` of something.

    ``has_headers``: whole files are counted, with their headers and the draft's file.
    """

    title: str
    nbytes: int
    cost: Cost
    has_headers: bool = False


def limits_of(budget: BudgetTable, config: ModelConfig) -> tuple[Limit, ...]:
    """Everything that the budget limits, what it says itself before what a machine's sizes say."""
    said = (
        (budget.file_nbytes, "bytes of all files", _padded, True),
        (budget.store_nbytes, "bytes of the expert store", _store, False),
        (budget.per_token_nbytes, "bytes read per token", _per_token(config), False),
    )
    limits = [Limit(title, n, cost, has) for n, title, cost, has in said if n is not None]
    return (*limits, *(_machine_limits(budget.machine) if budget.machine else ()))


def _machine_limits(machine: Machine) -> Iterator[Limit]:
    """What fits onto the drive and into the memories; see the head of this module."""
    if machine.drive_nbytes is not None:
        yield Limit("bytes of all files on the drive", machine.drive_nbytes, _padded, True)
    vram = max(0, (machine.vram_nbytes or 0) - machine.reserve_vram_nbytes)
    ram = max(0, (machine.ram_nbytes or 0) - machine.reserve_ram_nbytes)
    if machine.vram_nbytes is not None:
        yield Limit("bytes of dense tensors in VRAM", vram, _dense)
    if machine.ram_nbytes is not None:
        yield Limit("bytes in RAM and VRAM", vram + ram, _memory)


def _per_token(config: ModelConfig) -> Cost:
    return lambda target, nbytes: per_token_nbytes(target, nbytes, config)


def _padded(target: TargetTensor, nbytes: int) -> int:
    del target
    return padded(nbytes)


def _store(target: TargetTensor, nbytes: int) -> int:
    return nbytes if target.role is Role.ROUTED else 0


def _dense(target: TargetTensor, nbytes: int) -> int:
    return 0 if target.read_mode in (ReadMode.SPARSE, ReadMode.ROWS) else nbytes


def _memory(target: TargetTensor, nbytes: int) -> int:
    return 0 if target.is_table else nbytes
