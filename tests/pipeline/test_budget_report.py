"""The budget's tables against figures that others published for the same files."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest

from pipeline.budget import Budget, Item, NotCarried, budget_of, plan_items, written_items
from pipeline.digest import canonical_json
from pipeline.model.layout import Layout
from pipeline.model.roles import Role, SubRole
from pipeline.report.budget_json import budget_json
from pipeline.report.budget_page import all_tables, budget_markdown, named_tables
from pipeline.report.budget_report import budget_tables, read_table, role_table, type_mix
from pipeline.report.engram_reads import EngramReads, engram_reads, straddle
from pipeline.report.planner_table import planner_role_of, planner_table
from pipeline.report.tables import WIDTH, Cell, RowKind, Table, render_markdown, render_text
from tests.pipeline.released_plans import (
    plan_budget,
    released_config,
    released_plan,
    source_budget,
)

Q3, SERVED = "published-q3_k_m", "served"


def by_first(table: Table) -> dict[Cell, dict[str, Cell]]:
    titles = [column.title for column in table.columns]
    return {row.cells[0]: dict(zip(titles, row.cells, strict=True)) for row in table.rows}


def small_budget(step: str, *sizes: tuple[Role, SubRole, int]) -> Budget:
    items = [
        Item("t", role, sub, "F32", nbytes // 4, nbytes, nbytes) for role, sub, nbytes in sizes
    ]
    return budget_of(step, items)


def test_the_five_roles_of_the_published_file() -> None:
    rows = by_first(role_table(plan_budget(Q3), source_budget()[1]))
    found = {title: (row["tensors"], row["bytes"]) for title, row in rows.items()}
    assert found == {
        "routed experts": (120, 258_767_585_280),
        "engram": (8, 84_617_716_700),
        "attention + hyper-connection": (623, 2_220_253_632),
        "embeddings, norm, output": (175, 986_206_208),
        "shared experts": (120, 673_873_920),
        "total": (1046, 347_265_635_740),
        "draft (MTP), not carried": (2401, 7_932_874_632),
        "vision, not carried": (266, 970_536_960),
    }


def test_the_published_table_as_printed() -> None:
    lines = render_text(role_table(plan_budget(Q3), source_budget()[1])).splitlines()
    routed = next(line for line in lines if line.startswith("routed"))
    assert routed.split()[2:] == [
        *("120", "543,581,798,400", "258,767,585,280", "258.768", "240.996", "74.5", "%", "3.808")
    ]
    assert "Not carried into these files; bytes as in the checkpoint." in lines


def test_reads_changes_and_types_of_the_published_file() -> None:
    source, left_out = source_budget()
    rows = by_first(read_table(plan_budget(Q3), source, left_out))
    routed = rows["routed experts"]
    assert routed["read per token"] == 4_043_243_520
    assert routed["types"] == "Q3_K 80, Q4_K 38, Q5_K 2"
    assert routed["change in bytes"] == 258_767_585_280 - 288_777_830_400
    assert rows["draft (MTP), not carried"]["change in bytes"] == -7_932_874_632
    changes = [row["change in bytes"] for title, row in rows.items() if title != "total"]
    assert (
        sum(change for change in changes if isinstance(change, int))
        == (rows["total"]["change in bytes"])
    )


def test_the_first_step_has_no_change() -> None:
    table = read_table(plan_budget(Q3), None)
    assert [column.title for column in table.columns] == ["role", "read per token", "types"]


def test_a_step_that_lost_a_role_still_shows_its_change() -> None:
    before = small_budget("a", (Role.SHARED, SubRole.SHARED_UP, 40), (Role.DRAFT, SubRole.DRAFT, 8))
    after = small_budget("b", (Role.SHARED, SubRole.SHARED_UP, 20))
    rows = by_first(read_table(after, before, [NotCarried(Role.DRAFT, 1, 8)]))
    assert {title: row["change in bytes"] for title, row in rows.items()} == {
        "shared experts": -20,
        "draft (MTP), not carried": -8,
        "total": -28,
    }


@cache
def planner_rows(recipe: str) -> dict[Cell, dict[str, Cell]]:
    return by_first(planner_table(plan_items(released_plan(recipe))))


@pytest.mark.parametrize(
    ("recipe", "planner_role", "n", "nbytes", "per_token"),
    [
        (Q3, "token_embd", 1, 284_416_000, 2_200),
        (Q3, "head", 2, 542_996_480, 542_996_480),
        (Q3, "engram_table", 2, 84_482_513_500, 5_280),
        (Q3, "engram_dense", 6, 135_203_200, 135_203_200),
        (Q3, "hc", 240, 16_904_640, 16_904_640),
        (Q3, "router", 80, 157_347_840, 157_347_840),
        (Q3, "unused_vl", 40, 61_440, 0),
        (Q3, "shexp", 120, 673_873_920, 673_873_920),
        (Q3, "routed", 120, 258_767_585_280, 4_043_243_520),
        (Q3, "ffn_norm", 40, 819_200, 819_200),
        (Q3, "attn", 395, 2_203_914_240, 2_203_914_240),
        (SERVED, "token_embd", 1, 1_323_827_200, 10_240),
        (SERVED, "head", 2, 542_996_480, 542_996_480),
        (SERVED, "engram_table", 2, 208_902_215_200, 48 * 272),
        (SERVED, "engram_dense", 6, 334_397_440, 334_397_440),
        (SERVED, "hc", 240, 16_904_640, 16_904_640),
        (SERVED, "shexp", 120, 1_504_051_200, 1_504_051_200),
        (SERVED, "attn", 395, 5_435_412_480, 5_435_412_480),
        (SERVED, "total", 1046, 476_985_618_400, None),
    ],
)
def test_the_planner_counts_the_same(
    recipe: str, planner_role: str, n: int, nbytes: int, per_token: int | None
) -> None:
    row = planner_rows(recipe)[planner_role]
    assert (row["tensors"], row["bytes"]) == (n, nbytes)
    assert per_token is None or row["read per token"] == per_token


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("per_layer_token_embd.weight", "engram_table"),
        ("blk.14.engram_kv.weight", "engram_dense"),
        ("blk.14.engram_gate.weight", "engram_dense"),
        ("blk.3.exp_probs_b_vl.bias", "unused_vl"),
        ("blk.3.exp_probs_b.bias", "router"),
        ("blk.20.indexer.k_norm.weight", "attn"),
        ("output_norm.weight", "head"),
    ],
)
def test_planner_roles(name: str, role: str) -> None:
    assert planner_role_of(name) == role


def test_an_unknown_name_has_no_planner_role() -> None:
    with pytest.raises(KeyError, match="mystery"):
        planner_role_of("blk.0.mystery.weight")


def test_dense_bytes_with_and_without_the_engram_projections() -> None:
    (note,) = planner_table(plan_items(released_plan(Q3))).notes
    assert "3,731,059,520 bytes" in note
    # toktape recorded 3,595,917,760 from a running engine; it counts the unused biases too.
    assert f"{3_595_917_760 - 61_440:,} bytes" in note


@pytest.mark.parametrize("row", [84, 110, 144, 256, 264, 272, 512])
def test_straddle_is_what_counting_gives(row: int) -> None:
    crossed = [(n * row + row - 1) // 4096 - n * row // 4096 for n in range(4096)]
    assert straddle(row) == sum(crossed) / len(crossed)


@pytest.mark.parametrize(
    ("recipe", "layout", "row", "pages"),
    [
        (Q3, Layout.FORK, 110, 49.27),
        (Q3, Layout.MAINLINE, 110, 49.27),
        (SERVED, Layout.FORK, 272, 51.0),
    ],
)
def test_engram_reads(recipe: str, layout: Layout, row: int, pages: float) -> None:
    config = released_config()
    assert config.engram
    reads = engram_reads(plan_items(released_plan(recipe, layout)), config.engram)
    assert {one.row_nbytes for one in reads} == {row}
    assert sum(one.rows_per_token for one in reads) == 48
    assert sum(one.n_rows for one in reads) == 768_022_850
    assert sum(one.payload for one in reads) == 48 * row
    assert sum(one.pages for one in reads) == pytest.approx(pages, abs=0.005)


def test_the_engram_paragraph() -> None:
    tables = named_tables(plan_items(released_plan(Q3)), released_config())
    (note,) = tables[-1].notes
    assert "48 rows of 110 bytes: 2 layers x 3 n-gram orders x 8 heads" in note
    assert "5,280 bytes of payload" in note
    assert "49.27 pages of 4,096 bytes hold them on average (197.1 KiB), 96 at worst" in note


@pytest.mark.parametrize(
    ("row", "pages", "most"), [(512, 1, 1), (110, 1 + 108 / 4096, 2), (8192, 2, 2)]
)
def test_pages_of_one_row(row: int, pages: float, most: int) -> None:
    reads = EngramReads("t", "F32", 10, row, 1)
    assert (reads.pages, reads.most_pages) == (pages, most)


def test_expert_strides_are_the_planner_s() -> None:
    tables = named_tables(plan_items(released_plan(Q3)), released_config())
    rows = by_first(next(table for table in tables if table.title.startswith("Routed experts")))
    assert {layers: row["bytes per expert"] for layers, row in rows.items()} == {
        "0-1": 18_247_680,
        "2-39": 16_773_120,
        "total": None,
    }
    assert rows["2-39"]["down"] == 6_635_520
    assert rows["total"]["read per token"] == 4_043_243_520


def test_type_counts_of_the_published_file() -> None:
    tables = budget_tables([plan_budget(Q3)], released_config())
    counts = {title: row["tensors"] for title, row in by_first(tables[-1]).items()}
    assert counts == {
        "Q3_K": 476,
        "Q4_K": 76,
        "Q5_K": 4,
        "Q6_K": 1,
        "BF16": 40,
        "F32": 449,
        "total": 1046,
    }


def test_type_mix_names_the_largest_first() -> None:
    assert type_mix({"F32": (1_200, 5), "Q3_K": (2, 90), "BF16": (1, 5)}) == (
        "Q3_K 2, BF16 1, F32 1,200"
    )


@pytest.mark.parametrize(
    ("recipe", "layout"), [*product((Q3, SERVED), Layout), ("native", Layout.MAINLINE)]
)
def test_every_table_adds_up_and_fits_a_terminal(recipe: str, layout: Layout) -> None:
    plan = released_plan(recipe, layout)
    source, left_out = source_budget()
    items = plan_items(plan)
    written = budget_of("written", written_items(plan, [0, 3]))
    steps = [source, plan_budget(recipe, layout), written]
    tables = all_tables(steps, plan.config, left_out, items=items)
    for table in tables:
        text = render_text(table)
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= WIDTH
        check_sums(table)


def check_sums(table: Table) -> None:
    totals = [row for row in table.rows if row.kind is RowKind.TOTAL]
    body = [row for row in table.rows if row.kind is RowKind.BODY]
    for total in totals:
        for at, cell in enumerate(total.cells):
            if isinstance(cell, int):
                parts = [row.cells[at] or 0 for row in body]
                assert cell == sum(part for part in parts if isinstance(part, int)), table.title


def test_text_and_markdown_say_the_same_numbers() -> None:
    table = role_table(plan_budget(Q3))
    text, markdown = render_text(table), render_markdown(table)
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            assert column.write(cell) in text
            assert column.write(cell).replace("<", "&lt;") in markdown


def test_the_page_names_layout_units_and_what_is_left_out() -> None:
    plan, (_, left_out) = released_plan(Q3), source_budget()
    tables = budget_tables([plan_budget(Q3)], plan.config, left_out)
    page = budget_markdown(plan.name, [plan], tables, left_out, chart="budget.png")
    name = "model-published-q3_k_m"
    assert page.startswith(
        f"# Byte budget of {name}\n\n- `{name}`: **deepseek41 fork**, read by the V4.1 branches"
    )
    assert "- draft (MTP): 2,401 tensors, 7,932,874,632 bytes = 7.933 GB (7.388 GiB)\n" in page
    assert "GB = 1,000,000,000 bytes, GiB = 1,073,741,824 bytes." in page
    assert "expert stacks 6 of 384 experts" in page
    assert "![Bytes by role and step](budget.png)" in page
    assert page.count("\n## ") == len(tables)


def test_json_has_exact_numbers_and_changes() -> None:
    (source, left_out), plan = source_budget(), released_plan(Q3)
    document = budget_json([source, plan_budget(Q3)], plan.config, left_out, items=plan_items(plan))
    again = json.loads(canonical_json(document))
    step = again["steps"][1]
    assert (again["schema"], step["nbytes"]) == (1, 347_265_635_740)
    assert step["change_nbytes"] == 347_265_635_740 - 510_286_023_000
    routed = step["roles"][0]
    assert (routed["role"], routed["change_nbytes"]) == ("routed", -30_010_245_120)
    assert routed["types"]["Q5_K"]["n_tensors"] == 2
    assert again["steps"][0]["roles"][0]["change_nbytes"] is None
    assert sum(line["nbytes"] for line in step["sub_roles"]) == step["nbytes"]
    assert sum(role["n_tensors"] for role in again["planner_roles"]) == 1046
    assert [table["row_nbytes"] for table in again["engram"]] == [110, 110]
    assert {part["role"]: part["nbytes"] for part in again["not_carried"]} == {
        "draft": 7_932_874_632,
        "vision": 970_536_960,
    }
