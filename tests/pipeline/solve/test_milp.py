"""The choice: exact, within every limit, and honest where time runs out."""

from itertools import product

import numpy as np
import pytest

from pipeline.solve import proof
from pipeline.solve.highs import Programme
from pipeline.solve.milp import Option, least_error, undominated


def best(groups, rooms):
    """The least error of all choices, each looked at; nothing where none fits."""
    choices = product(*groups)
    fitting = (
        sum(option.error for option in chosen)
        for chosen in choices
        if all(sum(o.costs[at] for o in chosen) <= room for at, room in enumerate(rooms))
    )
    return min(fitting, default=None)


def cost(groups, numbers):
    return sum(group[n].costs[0] for group, n in zip(groups, numbers, strict=True))


def middle(groups, parts):
    """Rooms that far on the way from the smallest costs to the largest."""
    costs = [[[option.costs[at] for option in g] for g in groups] for at in range(len(parts))]
    ends = [(sum(map(min, one)), sum(map(max, one))) for one in costs]
    return [int(low + part * (high - low)) for (low, high), part in zip(ends, parts, strict=True)]


def random_groups(rng, n_groups, n_limits, scale):
    return [
        [
            Option(float(rng.random()), tuple(int(rng.integers(1, scale)) for _ in range(n_limits)))
            for _ in range(int(rng.integers(1, 5)))
        ]
        for _ in range(n_groups)
    ]


@pytest.mark.parametrize("scale", [10, 10**5, 6 * 10**11])
@pytest.mark.parametrize("n_limits", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_is_better(seed, n_limits, scale):
    rng = np.random.default_rng([seed, n_limits, scale])
    groups = random_groups(rng, 5, n_limits, scale)
    rooms = [int(scale * 5 * share) for share in rng.uniform(0.25, 0.7, n_limits)]
    wanted, found = best(groups, rooms), least_error(groups, rooms, seconds=10)
    if wanted is None:
        assert found is None
    else:
        assert found is not None
        assert found.is_proved
        assert found.error == pytest.approx(wanted, rel=1e-9)
        chosen = [group[n] for group, n in zip(groups, found.options, strict=True)]
        for at, room in enumerate(rooms):
            assert sum(option.costs[at] for option in chosen) <= room


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better_where_one_fits_to_the_byte(seed):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, 5, 1, 6 * 10**11)
    exact = cost(groups, [int(rng.integers(len(group))) for group in groups])
    for room in (exact - 1, exact, exact + 1):
        wanted, found = best(groups, [room]), least_error(groups, [room], seconds=10)
        if wanted is None:
            assert found is None
        else:
            assert found is not None
            assert found.error == pytest.approx(wanted, rel=1e-9)
            assert cost(groups, found.options) <= room


@pytest.mark.parametrize("nbytes", [999_999_999_999, 543_581_798_400])
def test_what_fits_to_the_byte_is_found_and_a_byte_more_is_not(nbytes):
    small, large = Option(1.0, (100,)), Option(0.0, (nbytes - 100,))
    groups = [[small, large], [Option(0.0, (100,))]]
    exact, less = (least_error(groups, [n], seconds=5) for n in (nbytes, nbytes - 1))
    assert exact is not None
    assert exact.options == (1, 0)
    assert less is not None
    assert less.options == (0, 0)


def test_what_the_solver_lets_through_by_a_byte_is_asked_for_again(monkeypatch):
    answers = iter([(0, 1), (1, 0)])

    class Careless(Programme):
        def solve(self, seconds):
            return next(answers), True

    monkeypatch.setattr("pipeline.solve.highs.Programme", Careless)
    groups = [[Option(1.0, (10,)), Option(2.0, (9,))], [Option(1.0, (9,)), Option(0.5, (11,))]]
    found = least_error(groups, [18], seconds=5)
    assert found is not None
    assert found.options == (1, 0)
    assert next(answers, None) is None


def test_a_forbidden_choice_is_not_found_again():
    groups = [[Option(1.0, (10,)), Option(2.0, (9,))], [Option(1.0, (9,)), Option(0.5, (11,))]]
    programme = Programme(groups, [100])
    assert programme.solve(5) == ((0, 1), True)
    programme.forbid((0, 1))
    assert programme.solve(5) == ((0, 0), True)


def test_an_option_that_another_beats_in_everything_is_not_looked_at():
    group = [Option(2.0, (5, 5)), Option(1.0, (5, 4)), Option(1.0, (5, 4)), Option(3.0, (1, 9))]
    assert undominated(group) == [1, 3]


def test_errors_far_apart_keep_their_order():
    groups = [
        [Option(1e-9, (10,)), Option(0.0, (20,))],
        [Option(1e3, (10,)), Option(1e3 - 1e-3, (20,))],
    ]
    found = least_error(groups, [30], seconds=5)
    assert found is not None
    assert found.options == (0, 1)


def test_nothing_to_choose_and_nothing_to_lose():
    found = least_error([[Option(0.0, ())]], [], seconds=5)
    assert found is not None
    assert (found.options, found.error, found.is_proved) == ((0,), 0.0, True)


# HiGHS with its simplifications calls this infeasible.
CALLED_INFEASIBLE = [
    [
        Option(0.02772260615101532, (4755852, 0, 0)),
        Option(0.05075037332667173, (5256468, 0, 0)),
        Option(2.262119136335222e-10, (32039424, 0, 0)),
    ],
    [
        Option(0.016409202303054832, (810370, 810370, 0)),
        Option(0.0029436158427995707, (1060848, 1060848, 0)),
        Option(0.000637884650337608, (1296592, 1296592, 0)),
    ],
    [Option(4.987380150927179e-06, (3905104, 3905104, 0))],
]
ROOMS = [36754897, 4715505, 0]


def test_the_solver_is_asked_again_without_its_simplifications():
    sensible = [[group[n] for n in undominated(group)] for group in CALLED_INFEASIBLE]
    assert Programme(sensible, ROOMS).solve(5) is not None


@pytest.fixture
def solver(monkeypatch):
    """Makes the solver say whatever is wanted."""

    def says(word):
        monkeypatch.setattr(Programme, "solve", lambda self, seconds: word)

    return says


@pytest.mark.parametrize("word", [None, ((1, 0), True)], ids=["infeasible", "a worse one"])
@pytest.mark.parametrize("seed", range(3))
def test_the_solver_is_not_believed(seed, word, solver):
    groups = random_groups(np.random.default_rng(seed), 5, 2, 6 * 10**11)
    groups = [sorted([*group, Option(2.0, (1, 1))], key=lambda o: -o.error) for group in groups]
    rooms = [10**12, 2 * 10**12]
    if word:
        word = ((0,) * 5, True)
    solver(word)
    found = least_error(groups, rooms, seconds=5)
    assert found is not None
    assert found.is_proved
    assert found.error == pytest.approx(best(groups, rooms), rel=1e-9)


def test_that_nothing_fits_is_proved(solver):
    solver(None)
    assert least_error(CALLED_INFEASIBLE, [36754897, 4715473, 0], seconds=5) is None
    fitting = least_error(CALLED_INFEASIBLE, [36754897, 4715474, 0], seconds=5)
    assert fitting is not None
    assert fitting.options == (0, 0, 0)


def test_what_cannot_be_proved_is_said_to_be_within_a_bound(monkeypatch, solver):
    groups = random_groups(np.random.default_rng(3), 6, 1, 1000)
    rooms = middle(groups, [0.4])
    monkeypatch.setattr(proof, "MOST_STATES", 0)
    found = least_error(groups, rooms, seconds=5)
    assert found is not None
    assert not found.is_proved
    assert found.error * (1 - found.gap) <= best(groups, rooms) <= found.error
    assert found.gap < 0.5
    solver(None)
    with pytest.raises(ArithmeticError, match="not proved"):
        least_error(groups, rooms, seconds=5)


@pytest.mark.parametrize("seed", range(6))
def test_a_proof_holds_whatever_the_prices(seed):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng, 5, 2, 10**6)
    rooms = middle(groups, [0.6, 0.6])
    least = best(groups, rooms)
    assert least is not None
    for prices in ([0.0, 0.0], (rng.random(2) / 1e6).tolist(), [1e3, 0.0]):
        assert proof.prove(groups, rooms, prices, least).better is None
        found = proof.prove(groups, rooms, prices, least * 1.0001).better
        assert found is not None
        chosen = [group[n] for group, n in zip(groups, found, strict=True)]
        assert sum(one.error for one in chosen) == pytest.approx(least)
        assert all(sum(one.costs[at] for one in chosen) <= rooms[at] for at in (0, 1))


@pytest.mark.parametrize("n_limits", [0, 1, 3])
def test_a_proof_leaves_out_only_what_another_stands_for(n_limits):
    rng = np.random.default_rng(n_limits)
    costs, errors = rng.integers(0, 4, (60, n_limits)), rng.integers(0, 9, 60).astype(float)
    kept = proof._undominated(costs, errors)
    assert 0 < len(kept) < 60
    for n in range(60):
        assert any((costs[m] <= costs[n]).all() and errors[m] <= errors[n] for m in kept)
