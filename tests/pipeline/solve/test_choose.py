"""An answer keeps every limit of the real plan, and what cannot be kept is told."""

import re
from dataclasses import replace
from itertools import product

import pytest

from pipeline.errors import PlanError, Problems
from pipeline.recipe.choose import choose as choice_of
from pipeline.recipe.resolve import resolve_types
from pipeline.report.frontier_chart import frontier_png, tick_labels
from pipeline.report.solve_json import solve_json
from pipeline.report.solve_table import as_comments, groups_table, limits_table, next_sentence
from pipeline.report.tables import render_text
from pipeline.report.units import scale_for
from pipeline.solve.answer import solved_recipe
from pipeline.solve.choose import choose, require_fits, smallest_types, with_limit
from pipeline.solve.frontier import binding, frontier, group_answers
from pipeline.solve.objective import Objective
from tests.pipeline.solve.asking import file_nbytes, question, recipe, targets

TYPES = """
candidates = ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "BF16"]
[budget.types]
routed = ["Q2_K", "Q3_K", "MXFP4"]
attention = []
shared = ["Q3_K", "Q8_0"]
engram_table = []
"""
SUB_ROLES = 'hyper_connection = "F32"'
FIXED = """
[[override]]
sub_roles = ["compressor"]
type = "BF16"

[[override]]
sub_roles = ["indexer"]
type = "Q8_0"
"""


def asked(limit, granularity="sub_role"):
    return recipe(
        f'{limit}\ngranularity = "{granularity}"\n{TYPES}', sub_roles=SUB_ROLES, more=FIXED
    )


def with_limits(limits, types):
    return question(recipe(f"{limits}\n{types}", sub_roles=SUB_ROLES, more=FIXED))


def between(part):
    """So many bytes of the way from the smallest files to the largest."""
    one = question(asked("file_nbytes = 1"))
    low = file_nbytes(smallest_types(one))
    high = file_nbytes(one.types_of([len(group.types) - 1 for group in one.groups]))
    return int(low + part * (high - low))


HALF = between(0.5)


@pytest.mark.parametrize("granularity", ["sub_role", "layers", "tensor"])
@pytest.mark.parametrize("objective", Objective)
def test_an_answer_is_within_its_limit_and_its_recipe_gives_its_types(granularity, objective):
    said = asked(f"file_nbytes = {HALF}", granularity)
    one = question(said, objective)
    answer = choose(one, file_nbytes, seconds=10)
    assert answer.picks.is_proved
    solved = solved_recipe(said, targets(), answer.types)
    assert solved.budget is None
    assert resolve_types(solved, targets()) == dict(answer.types)
    assert answer.used == (file_nbytes(answer.types),)
    assert answer.used[0] <= HALF
    smallest = sum(one.options(group)[0].error for group in one.groups)
    fixed = one.error(smallest_types(one)) - smallest
    assert one.error(answer.types) == pytest.approx(answer.error + fixed)


def test_finer_granularity_is_never_worse():
    errors = [
        choose(question(asked(f"file_nbytes = {HALF}", word)), file_nbytes, seconds=10).error
        for word in ("sub_role", "layers", "tensor")
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1]


def test_no_choice_by_sub_role_is_better():
    one = question(asked(f"file_nbytes = {HALF}"))
    answer = choose(one, file_nbytes, seconds=10)
    headers = answer.headers
    every = product(*(range(len(group.types)) for group in one.groups))
    options = [one.options(group) for group in one.groups]
    room = HALF - headers - one.fixed_cost(one.limits[0])
    errors = (
        sum(group[n].error for group, n in zip(options, picks, strict=True))
        for picks in every
        if sum(group[n].costs[0] for group, n in zip(options, picks, strict=True)) <= room
    )
    assert answer.error == pytest.approx(min(errors))


def test_a_limit_that_the_answer_just_meets_gives_the_answer_again():
    first = choose(question(asked(f"file_nbytes = {HALF}", "layers")), file_nbytes, seconds=10)
    exact = question(asked(f"file_nbytes = {first.used[0]}", "layers"))
    again = choose(exact, file_nbytes, seconds=10)
    assert again.types == first.types
    less = question(asked(f"file_nbytes = {first.used[0] - 1}", "layers"))
    assert choose(less, file_nbytes, seconds=10).error > first.error


def test_headers_that_grow_with_the_choice_do_not_break_the_limit():
    one = question(asked(f"file_nbytes = {HALF}", "layers"))
    plain = choose(one, file_nbytes, seconds=10)

    def growing(types):
        larger = sum(a is not b for a, b in zip(types.values(), first, strict=True))
        return file_nbytes(types) + 4096 * larger

    first = list(smallest_types(one).values())
    answer = choose(one, growing, seconds=10)
    assert growing(answer.types) <= HALF < growing(plain.types)


def test_all_limits_are_kept_at_once():
    names = ("file_nbytes", "store_nbytes", "per_token_nbytes")
    free = question(asked("\n".join(f"{name} = {10**12}" for name in names), "layers"))
    low, high = smallest_types(free), choose(free, file_nbytes, seconds=10).types
    rooms = [
        (free.used(low, limit) + free.used(high, limit)) // 2 + limit.has_headers * 50_000
        for limit in free.limits
    ]
    limits = "\n".join(f"{name} = {n}" for name, n in zip(names, rooms, strict=True))
    one = question(asked(limits, "layers"))
    answer = choose(one, file_nbytes, seconds=10)
    assert all(used <= room for used, room in zip(answer.used, rooms, strict=True))
    for name, room in zip(names, rooms, strict=True):
        alone = choose(question(asked(f"{name} = {room}", "layers")), file_nbytes, seconds=10)
        assert answer.error > alone.error


def test_what_is_too_small_for_every_choice_is_told_by_how_much():
    one = question(asked("file_nbytes = 1_000_000"))
    least = file_nbytes(smallest_types(one))
    with pytest.raises(PlanError) as raised:
        choose(one, file_nbytes, seconds=10)
    assert f"{least:,} with the smallest types" in str(raised.value)
    assert f"{least - 1_000_000:,} too many" in str(raised.value)


def test_what_is_fixed_is_named_and_nothing_is_measured_for_it():
    said = recipe(f"file_nbytes = 1_000_000\n{TYPES}", sub_roles=SUB_ROLES, more=FIXED)
    one = replace(
        question(said),
        losses={},
        fixed_by={t.name: choice_of(said, t).reason for t in targets()},
        draft_nbytes=4_321_000,
    )
    with pytest.raises(PlanError) as raised:
        require_fits(one, lambda types: file_nbytes(types) + 4_321_000)
    told = str(raised.value)
    assert "engram_dense stays Q8_0 by roles.engram (" in told
    assert "hyper_connection stays F32 by sub_roles.hyper_connection (" in told
    assert "compressor stays BF16 by override 1 (compressor) (" in told
    assert "the draft's file (4,321,000)" in told
    assert f"{file_nbytes(smallest_types(one)) + 4_321_000:,} with the smallest types" in told


def test_every_limit_that_is_missed_is_told():
    one = question(asked("file_nbytes = 1_000_000\nstore_nbytes = 1000"))
    with pytest.raises(Problems, match=r"bytes of all files(.|\n)*bytes of the expert store"):
        choose(one, file_nbytes, seconds=10)


def test_the_least_possible_is_possible():
    one = question(asked(f"file_nbytes = {between(0)}"))
    assert choose(one, file_nbytes, seconds=10).types == smallest_types(one)


def test_with_room_for_everything_nothing_is_lost_but_what_must_be():
    answer = choose(question(asked(f"file_nbytes = {between(2)}")), file_nbytes, seconds=10)
    one = question(asked(f"file_nbytes = {between(2)}"))
    assert answer.error == pytest.approx(
        sum(min(option.error for option in one.options(group)) for group in one.groups)
    )
    assert frontier(one, answer, seconds=5).next is None


@pytest.fixture(scope="module")
def answered():
    one = question(asked(f"file_nbytes = {HALF}\nstore_nbytes = 100_000_000_000", "layers"))
    answer = choose(one, file_nbytes, seconds=10)
    return one, answer, frontier(one, answer, seconds=5)


def test_the_limit_that_decides_is_the_one_with_least_left(answered):
    one, answer, around = answered
    assert around.axis == binding(one, answer, seconds=5) == 0


def test_along_the_frontier_more_bytes_never_lose_more(answered):
    _, answer, around = answered
    errors = [point.error for point in around.points]
    assert errors == sorted(errors, reverse=True)
    assert len(around.points) >= 5
    assert all(point.nbytes <= point.limit_nbytes for point in around.points)
    (here,) = [point for point in around.points if point.limit_nbytes == HALF]
    assert here.nbytes == answer.used[0]
    assert len({(point.nbytes, point.error) for point in around.points}) == len(around.points)


def test_tables_documents_and_points_have_one_sum(answered):
    one, answer, around = answered
    (here,) = [point for point in around.points if point.limit_nbytes == HALF]
    total = one.error(answer.types)
    assert here.error == pytest.approx(total, rel=1e-12)
    assert around.fixed_error == pytest.approx(total - answer.error)
    assert around.fixed_error > 0
    groups = group_answers(one, answer)
    assert f"is {here.error:.6g} (relative)" in " ".join(groups_table(groups, one, answer).notes)
    document = solve_json("asked", one, answer, around, groups)
    assert document["error"] == pytest.approx(here.error, rel=1e-12)


def test_answers_that_are_the_same_are_one_point():
    one = question(asked(f"file_nbytes = {between(1)}"))
    answer = choose(one, file_nbytes, seconds=10)
    points = frontier(one, answer, seconds=5).points
    assert len({(point.nbytes, point.error) for point in points}) == len(points)
    assert between(1) in [point.limit_nbytes for point in points]


@pytest.mark.parametrize("part", [0.5, 2])
def test_a_limit_that_no_choice_changes_does_not_decide(part):
    types = TYPES.replace('routed = ["Q2_K", "Q3_K", "MXFP4"]\n', "")
    store = with_limits(f"file_nbytes = {between(part)}\nstore_nbytes = 1_000_000_000", types)
    room = store.used(smallest_types(store), store.limits[1])
    one = with_limit(store, 1, room)
    answer = choose(one, file_nbytes, seconds=10)
    assert answer.used[1] == room
    assert binding(one, answer, seconds=5) == 0


def test_a_limit_without_which_nothing_changes_does_not_decide():
    wide = question(asked(f"file_nbytes = {HALF}\nstore_nbytes = 1_000_000_000_000", "layers"))
    first = choose(wide, file_nbytes, seconds=10)
    one = with_limit(wide, 1, first.used[1])
    answer = choose(one, file_nbytes, seconds=10)
    assert answer.used[0] < HALF
    assert answer.used[1] == one.limits[1].nbytes
    assert binding(one, answer, seconds=5) == 0


def test_labels_of_an_axis_differ():
    for ticks in ([66_000_000, 66_000_001], [0.5e9, 1e9, 1.5e9], [1e9]):
        labels = tick_labels(ticks, scale_for(int(max(ticks))))
        assert len(set(labels.values())) == len(ticks)
    assert tick_labels([1e9, 2e9], scale_for(10**9)) == {1e9: "1 GB", 2e9: "2 GB"}


def test_the_next_step_is_what_a_new_search_finds(answered):
    one, answer, around = answered
    step = around.next
    assert step is not None
    more = question(asked(f"file_nbytes = {HALF + step.nbytes}", "layers"))
    found = choose(more, file_nbytes, seconds=10)
    assert step.error == pytest.approx(answer.error - found.error)
    changed = {group.title: (a.name, b.name) for group, a, b in step.changes}
    for group in one.groups:
        before, after = (a.types[group.targets[0].name].name for a in (answer, found))
        assert changed.get(group.title, (after, after)) == (before, after)


def test_neighbours_are_real_types_of_the_group(answered):
    one, answer, _ = answered
    for told in group_answers(one, answer):
        for other, sign in ((told.smaller, -1), (told.larger, 1)):
            if other is not None:
                assert other.nbytes == told.group.nbytes(other.type) - told.nbytes
                assert other.nbytes * sign > 0
                assert other.error * sign <= 0
        options, sizes = one.options(told.group), map(told.group.nbytes, told.group.types)
        others = list(zip(sizes, (option.error for option in options), strict=True))
        if told.larger:
            better = [n for n, error in others if n > told.nbytes and error < told.error]
            assert told.larger.nbytes == min(better) - told.nbytes
        if told.smaller:
            least = min(error for n, error in others if n < told.nbytes)
            assert told.smaller.error == least - told.error
        # Nothing larger is better only where it has the best already.
        errors = [option.error for option in one.options(told.group)]
        assert (told.larger is None) == (told.error == min(errors))


def test_weights_move_bytes():
    def error_of_routed(weights):
        said = recipe(
            f"file_nbytes = {HALF}\n{TYPES}\n[budget.weights]\n{weights}", sub_roles=SUB_ROLES
        )
        one = question(said)
        answer = choose(one, file_nbytes, seconds=10)
        plain = question(asked(f"file_nbytes = {HALF}"))
        groups = [group for group in plain.groups if group.title.startswith("attention")]
        return sum(
            plain.options(group)[group.types.index(answer.types[group.targets[0].name])].error
            for group in groups
        )

    assert error_of_routed("attention = 1000.0") < error_of_routed("attention = 0.001")


def test_tables_say_what_the_answer_says(answered):
    one, answer, around = answered
    groups = group_answers(one, answer)
    table = groups_table(groups, one, answer)
    assert table.values("bytes")[:-1] == tuple(told.nbytes for told in groups)
    assert table.values("bytes")[-1] == sum(told.nbytes for told in groups)
    assert table.values("type")[:-1] == tuple(told.type.name for told in groups)
    assert limits_table(one, answer).values("used") == answer.used
    assert limits_table(one, answer).values("left")[0] == HALF - answer.used[0]
    short = groups_table(groups, one, answer, most=3)
    assert len(short.rows) == 4
    assert f"{len(groups) - 3} groups are not shown" in render_text(short)
    assert all(len(line) <= 120 for line in render_text(table).splitlines())
    sentence = next_sentence(around, one, answer)
    assert sentence.startswith("The next ")
    comments = as_comments((table,), sentence)
    assert all(re.match(r"#( |$)", line) for line in comments.splitlines())
    assert sentence.split()[-1] in comments


def test_types_that_a_rule_forbids_are_told_with_the_reason(answered):
    _, _, around = answered
    said = TYPES.replace('["Q3_K", "Q8_0"]', '["Q3_K", "IQ2_XXS", "Q8_0"]')
    one = with_limits(f"file_nbytes = {HALF}", said)
    answer = choose(one, file_nbytes, seconds=10)
    groups = group_answers(one, answer)
    (told,) = groups_table(groups, one, answer).notes[2:]
    assert told == "Not to choose from (shared_gate, shared_up, shared_down): importance."
    document = solve_json("asked", one, answer, around, groups)
    names = {g["group"]: [name for name, _ in g["refused"]] for g in document["groups"]}
    assert names["shared_up"] == ["IQ2_XXS"]
    assert names["routed_up"] == []


def test_what_is_not_proved_is_not_called_so(answered):
    one, answer, _ = answered
    for is_done, words in ((True, "the solver knows no better one"), (False, "cut short")):
        open_one = replace(answer, picks=replace(answer.picks, gap=0.0123, is_done=is_done))
        told = " ".join(groups_table(group_answers(one, answer), one, open_one).notes)
        assert words in told
        assert "none is smaller by more than 1.2 %" in told
        assert "proved" not in told


def test_the_document_has_every_group_and_point(answered):
    one, answer, around = answered
    document = solve_json("asked", one, answer, around, group_answers(one, answer))
    named = [name for group in document["groups"] for name in group["tensors"]]
    assert sorted(named) == sorted(t.name for group in one.groups for t in group.targets)
    assert len(document["points"]) == len(around.points)
    assert document["gap"] == 0


def test_the_picture_is_the_same_every_time(answered):
    _, _, around = answered
    first, again = (frontier_png(around.points, HALF, "bytes", "asked") for _ in range(2))
    assert first == again
    assert first != frontier_png(around.points[1:], HALF, "bytes", "asked")
    assert first != frontier_png(around.points, HALF, "bytes", "asked", fixed_error=0.5)
    assert frontier_png(around.points[:1], HALF, "bytes", "asked").startswith(b"\x89PNG")
