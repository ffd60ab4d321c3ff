"""Every shipped recipe's miniature in real engines: it loads, computes, drafts and stays as close.

`scripts/quality` prints what is bounded here.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.gguf.model_file import read_shards
from pipeline.miniature.size import MiniatureSize
from tests.engines.engine import Engine
from tests.engines.quality import N_POSITIONS, Bench, Quality
from tests.engines.shipped import (
    DRAFT_ONLY,
    N_KEPT,
    RECIPES,
    WITH_TARGET,
    Shipped,
    is_for_v4,
    keep_list,
)

pytestmark = pytest.mark.engine

MEASURED = {
    "bpw-2.4-mainline": Quality(kl=4.691, top_1=0.065),
    "bpw-3.0-mainline": Quality(kl=4.068, top_1=0.065),
    "lowbit-q2_k": Quality(kl=2.491, top_1=0.150),
    "native": Quality(kl=0.501, top_1=0.580),
    "published-q2_k": Quality(kl=4.422, top_1=0.035),
    "published-q3_k_m": Quality(kl=3.987, top_1=0.070),
    "q4-class": Quality(kl=0.522, top_1=0.570),
    "reap-256-bpw-2.4-mainline": Quality(kl=5.364, top_1=0.040),
    "reap-256-bpw-3.0-mainline": Quality(kl=4.151, top_1=0.075),
    "reap-256-native": Quality(kl=0.308, top_1=0.660),
    "reap-256-q3": Quality(kl=1.198, top_1=0.315),
    "reap-256-q4-class": Quality(kl=0.341, top_1=0.630),
    "reap-320-q3": Quality(kl=1.450, top_1=0.260),
    "served": Quality(kl=1.406, top_1=0.290),
    "served-lean": Quality(kl=1.500, top_1=0.295),
    "v4-native": Quality(kl=0.094, top_1=0.765),
    "v4-q3_k": Quality(kl=0.743, top_1=0.410),
}
"""In llama.cpp b12211. The native engine's V4 figures are within a thirtieth of these."""

MORE_KL, LESS_AGREEMENT = 1.3, 0.1
"""How much worse is no regression: other processors add up in another order, and choices flip."""

PROMPT = "Plan, then fill."
N_GENERATED = 5
NEVER = -1e9
"""A bias with which no expert is chosen."""

BOTH = [
    pytest.param(recipe, engine, id=f"{recipe}-{engine}")
    for recipe in WITH_TARGET
    for engine in (("mainline", "native") if is_for_v4(recipe) else ("mainline",))
]


@pytest.fixture(scope="module")
def bench(miniature: Path, v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Shipped(miniature, v4_miniature, tmp_path_factory.mktemp("shipped recipes")))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def test_every_shipped_recipe_is_measured() -> None:
    assert {*MEASURED, DRAFT_ONLY} == set(RECIPES)


@pytest.mark.parametrize(("recipe", "engine"), BOTH, indirect=["engine"])
def test_it_loads_and_computes(bench: Bench, recipe: str, engine: Engine) -> None:
    answer = bench.made(engine, recipe)
    assert len(answer.logprobs) == N_POSITIONS
    assert np.isfinite(answer.logprobs).all()
    assert np.abs(np.exp(answer.logprobs).sum(axis=1) - 1).max() < 1e-12
    assert answer.logprobs.std(axis=1).min() > 0.1
    model = read_shards(bench.shipped.made(recipe).target)
    tensors = [tensor for _, tensor in model.tensors.values()]
    assert answer.n_params == sum(math.prod(tensor.ne) for tensor in tensors)
    assert answer.nbytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(("recipe", "engine"), BOTH, indirect=["engine"])
def test_it_is_as_close_to_exact_as_it_was(bench: Bench, recipe: str, engine: Engine) -> None:
    now, measured = bench.quality(engine, recipe), MEASURED[recipe]
    assert 0 < now.kl < MORE_KL * measured.kl
    assert now.top_1 > measured.top_1 - LESS_AGREEMENT


def test_more_bits_are_closer(bench: Bench, mainline: Engine) -> None:
    names = ("native", "served-lean", "lowbit-q2_k", "published-q3_k_m", "published-q2_k")
    divergences = [bench.quality(mainline, name).kl for name in names]
    assert divergences == sorted(divergences)


DRAFTED = [name for name in WITH_TARGET if not name.startswith("published-")]


@pytest.mark.parametrize("recipe", DRAFTED)
def test_its_draft_changes_no_token(bench: Bench, mainline: Engine, recipe: str) -> None:
    made = bench.shipped.made(recipe)
    assert made.draft
    with mainline.load(made.target) as session:
        prompt = session.tokenize(PROMPT)
        alone = session.generate(prompt, N_GENERATED)
    with mainline.load(made.target, draft=made.draft) as session:
        drafted = session.generate(prompt, N_GENERATED)
    assert drafted.tokens == alone.tokens
    assert drafted.n_drafted >= N_GENERATED


def test_published_files_have_no_draft(bench: Bench) -> None:
    without = [name for name in WITH_TARGET if not bench.shipped.made(name).draft]
    assert without == [name for name in WITH_TARGET if name not in DRAFTED]


def test_the_draft_alone_is_the_one_that_lies_beside_targets(bench: Bench) -> None:
    alone = bench.shipped.made(DRAFT_ONLY)
    assert not alone.target
    assert alone.draft.read_bytes() == bench.shipped.made("native").draft.read_bytes()


def test_a_pruned_model_is_the_whole_one_whose_other_experts_are_never_chosen(
    bench: Bench, mainline: Engine, tmp_path: Path
) -> None:
    """Bit for bit: every sum that is left has the same summands in the same order."""
    kept = keep_list(MiniatureSize(), N_KEPT["reap-256-native"]).layers
    whole = bench.shipped.made("native").target
    masked = [shutil.copy(shard, tmp_path) for shard in whole]
    for name, (no, tensor) in read_shards(whole).tensors.items():
        if name.endswith("exp_probs_b.bias"):
            layer = int(name.split(".")[1])
            bias = np.memmap(masked[no], "<f4", "r+", tensor.offset, tensor.ne)
            bias[[e for e in range(len(bias)) if e not in kept[layer]]] = NEVER
            bias.flush()
    answer = bench.answer(mainline, tuple(map(Path, masked)))
    assert np.array_equal(answer.logprobs, bench.made(mainline, "reap-256-native").logprobs)
    assert not np.array_equal(answer.logprobs, bench.made(mainline, "native").logprobs)
