"""The solver against every recipe made by hand: at the same bytes it never loses more."""

import numpy as np
import pytest

from pipeline.gguf.keys import text
from pipeline.importance.columns import no_importance
from pipeline.model.config import read_config
from pipeline.model.roles import ReadMode
from pipeline.model.targets.trunk import target_form, target_tensors
from pipeline.plan import make_plan
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.libraries import Libraries
from pipeline.quant.types import TYPES
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.rules import Rules
from pipeline.solve.cache import ErrorCache
from pipeline.solve.candidates import groups_of
from pipeline.solve.choose import choose
from pipeline.solve.limits import limits_of
from pipeline.solve.measure import Measuring, measure
from pipeline.solve.objective import Objective
from pipeline.solve.question import Question
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from tasks.recipe_file import read_recipe, shipped_names
from tests.pipeline.solve.asking import recipe

N_ROWS = 8


def types_of(made):
    """Every type that a recipe names."""
    said = {**made.roles.model_dump(), **made.sub_roles.model_dump()}.values()
    return {name for name in (*said, *(o.type for o in made.override)) if name in TYPES}


def is_compared(name, made):
    """Keep lists and grafts change no type; "source" is none to choose."""
    return (
        made.roles is not None
        and made.roles.routed in TYPES
        and not (name.startswith("v4-") or made.experts.n_keep or made.graft or made.budget)
    )


MADE = {name: made for name in shipped_names() if is_compared(name, made := read_recipe(name))}
FAMILIES = {
    name: "ik" if any(TYPES[one].family == "ik" for one in types_of(made)) else "mainline"
    for name, made in MADE.items()
}
NAMED = {name for made in MADE.values() for name in types_of(made)}
CANDIDATES = {
    "mainline": sorted(name for name in NAMED if TYPES[name].family == "mainline"),
    "ik": sorted(NAMED),
}


@pytest.fixture(scope="module")
def source(miniature):
    checkpoint = open_checkpoint(miniature)
    config = read_config(checkpoint.config, file=miniature, stored=checkpoint.weight_map)
    with SourceReader(checkpoint) as reader:
        yield config, reader


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ErrorCache(tmp_path_factory.mktemp("errors"))


def drawn(target):
    """Importance as unequal as a real one, by the tensor's name; none for tables and vectors."""
    if target.read_mode is ReadMode.ROWS or len(target.shape) < 2:
        return None
    rng = np.random.default_rng(list(target.name.encode()))
    return rng.lognormal(0, 1.2, (len(target.matrices), target.n_cols)).astype(np.float32)


def asked(name, nbytes):
    made = MADE[name]
    free = "\n".join(f"{role} = []" for role in made.roles.model_dump())
    said = recipe(
        f'file_nbytes = {nbytes}\ngranularity = "tensor"\n'
        f"candidates = {CANDIDATES[FAMILIES[name]]}\n[budget.types]\n{free}\n"
    )
    return said.model_copy(update={"output": made.output})


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_at_the_bytes_of_a_recipe_made_by_hand_the_solver_loses_less(name, source, cache):
    if FAMILIES[name] == "ik" and not IkQuantizer.package.is_installed:
        pytest.skip("without ik_llama.cpp's library")
    (config, reader), made, libraries = source, MADE[name], Libraries()
    layout = made.output.layout
    targets = target_tensors(config, layout)
    importance = drawn if made.imatrix.required else no_importance

    def is_weighted(target):
        return importance(target) is not None

    by_hand = resolve_types(made, targets, weighted=is_weighted)

    def file_nbytes(types):
        return make_plan(
            name=name,
            form=target_form(config, layout),
            config=config,
            targets=targets,
            types=types,
            key_values=[text("general.architecture", "deepseek41")],
            shard_nbytes=made.output.shard_nbytes,
        ).nbytes

    said = asked(name, file_nbytes(by_hand))
    groups = groups_of(said, targets, Rules(said, is_weighted).broken)
    free = {target.name: group for group in groups for target in group.targets}
    # What was done by hand is among the choices, so the best of them is at least as good.
    assert all(by_hand[name] in group.types for name, group in free.items())
    fixed = {t.name: by_hand[t.name] for t in targets if t.name not in free}
    wanted = {t: free[t.name].types if t.name in free else (fixed[t.name],) for t in targets}
    version = libraries.version_of
    measuring = Measuring(
        reader,
        libraries,
        cache,
        N_ROWS,
        lambda t: t.name,
        lambda one: version([one]),
        importance,
        lambda t: is_weighted(t),
    )
    losses = measure(wanted, measuring, n_threads=2)
    for objective in Objective:
        question = Question(
            config,
            targets,
            groups,
            fixed,
            losses,
            limits_of(said.budget, config),
            objective,
            lambda _: 1.0,
        )
        answer = choose(question, file_nbytes, seconds=20)
        assert file_nbytes(answer.types) <= file_nbytes(by_hand)
        assert question.error(answer.types) < question.error(by_hand)
