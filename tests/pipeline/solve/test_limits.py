"""What limits count is what plans and budgets count."""

import pytest

from pipeline.budget import budget_of, plan_items
from pipeline.errors import RecipeError
from pipeline.model.roles import ReadMode, Role
from pipeline.recipe.budget_table import BudgetTable, Machine
from pipeline.solve.limits import limits_of
from tests.pipeline.released_plans import released_plan
from tests.pipeline.solve.asking import recipe

PLAN = released_plan("served-lean")
BUDGET = budget_of("plan", plan_items(PLAN))


def sums(**budget):
    """Title -> what the plan takes of the limit."""
    limits = limits_of(BudgetTable(**budget), PLAN.config)
    return {
        limit.title: sum(limit.cost(tensor.target, tensor.nbytes) for tensor in PLAN.tensors)
        for limit in limits
    }


def nbytes_of(keep):
    return sum(tensor.nbytes for tensor in PLAN.tensors if keep(tensor.target))


def test_files_are_counted_to_the_byte_but_for_their_headers():
    (found,) = sums(file_nbytes=1).values()
    assert found + sum(len(shard.header) for shard in PLAN.shards) == PLAN.nbytes


def test_the_store_is_every_expert_stack():
    assert sums(store_nbytes=1) == {"bytes of the expert store": 258_767_585_280}


def test_bytes_per_token_are_those_of_the_budget():
    assert sums(per_token_nbytes=1) == {"bytes read per token": BUDGET.per_token}


def test_a_machine_holds_what_a_token_passes_in_vram_and_all_but_tables_in_memory():
    machine = Machine(
        vram_nbytes=77_309_411_328,
        ram_nbytes=270_071_001_088,
        drive_nbytes=10**12,
        reserve_vram_nbytes=6_000_000_000,
        reserve_ram_nbytes=20_000_000_000,
    )
    limits = limits_of(BudgetTable(machine=machine), PLAN.config)
    assert {limit.title: (limit.nbytes, limit.has_headers) for limit in limits} == {
        "bytes of all files on the drive": (10**12, True),
        "bytes of dense tensors in VRAM": (71_309_411_328, False),
        "bytes in RAM and VRAM": (71_309_411_328 + 250_071_001_088, False),
    }
    found = sums(machine=machine)
    tables = nbytes_of(lambda target: target.is_table)
    assert found["bytes in RAM and VRAM"] == PLAN.data_nbytes - tables
    dense = BUDGET.per_token - sum(
        line.per_token for line in BUDGET.sub_roles if line.sub_role in ("engram_table",)
    )
    dense -= BUDGET.line(Role.ROUTED).per_token
    dense -= next(i.per_token for i in plan_items(PLAN) if i.name == "token_embd.weight")
    unread = nbytes_of(lambda target: target.read_mode is ReadMode.NONE)
    assert found["bytes of dense tensors in VRAM"] == dense + unread


@pytest.mark.parametrize(
    ("said", "titles"),
    [
        ({"vram_nbytes": 10}, ["bytes of dense tensors in VRAM"]),
        ({"ram_nbytes": 12, "reserve_ram_nbytes": 2}, ["bytes in RAM and VRAM"]),
    ],
)
def test_a_machine_without_one_memory_is_limited_by_the_other(said, titles):
    limits = limits_of(BudgetTable(machine=Machine(**said)), PLAN.config)
    assert [limit.title for limit in limits] == titles
    assert limits[0].nbytes == 10


def test_what_the_budget_says_itself_comes_first():
    titles = list(sums(file_nbytes=1, store_nbytes=1, machine=Machine(ram_nbytes=5)))
    assert titles == ["bytes of all files", "bytes of the expert store", "bytes in RAM and VRAM"]


@pytest.mark.parametrize("memory", ["vram", "ram"])
def test_a_reserve_that_leaves_nothing_is_refused(memory):
    said = f"[budget.machine]\n{memory}_nbytes = 1_000\nreserve_{memory}_nbytes = 1_000"
    with pytest.raises(RecipeError, match=f"reserve_{memory}_nbytes leaves nothing"):
        recipe(f"[budget.types]\nrouted = ['Q3_K']\n{said}")


@pytest.mark.parametrize("said", ["", "reserve_ram_nbytes = 5"])
def test_a_machine_without_a_size_limits_nothing(said):
    with pytest.raises(RecipeError, match="nothing is limited"):
        recipe(f"[budget.types]\nrouted = ['Q3_K']\n[budget.machine]\n{said}")
