"""Questions about the small miniature, with made-up losses: nothing is read or quantized."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pipeline.gguf.keys import text
from pipeline.miniature.checkpoint import miniature_blueprint
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_form, target_tensors
from pipeline.plan import make_plan
from pipeline.quant.types import TYPES
from pipeline.recipe.choose import choose as choice_of
from pipeline.recipe.rules import Rules
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.solve.candidates import groups_of
from pipeline.solve.limits import limits_of
from pipeline.solve.measure import Loss
from pipeline.solve.objective import Objective
from pipeline.solve.question import Question
from tests.conftest import SMALL

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0", "BF16")


@cache
def config() -> ModelConfig:
    import json

    return read_config(json.loads(miniature_blueprint(SMALL, 1).config))


def targets(layout: Layout = Layout.FORK) -> tuple[TargetTensor, ...]:
    return target_tensors(config(), layout)


def recipe(budget: str, *, sub_roles: str = "", more: str = "") -> Recipe:
    content = f"""
allow = ["below_bf16", "larger_than_fp4"]
[roles]
routed = "Q3_K"
engram = "Q8_0"
attention = "Q8_0"
embedding = "BF16"
shared = "Q8_0"
[sub_roles]
{sub_roles}
[output]
layout = "fork"
{more}
[budget]
{budget}
"""
    return parse_recipe(content.encode(), Path("asked.toml"))


def made_up(target: TargetTensor, name: str) -> Loss:
    """Errors that fall by four with every bit, and differ a little from tensor to tensor."""
    lost = 0.0 if name in ("F32", "I32") else 4.0 ** -TYPES[name].bpw
    return Loss(lost * (1 + (sum(map(ord, target.name)) % 7) / 10), 1.0, 4, target.n_rows)


def rule_of(asked: Recipe):
    return Rules(asked, lambda _: False).broken


def question(asked: Recipe, objective: Objective = Objective.RELATIVE) -> Question:
    assert asked.budget is not None
    groups = groups_of(asked, targets(), rule_of(asked))
    free = {target.name for group in groups for target in group.targets}
    fixed = {t.name: choice_of(asked, t).type for t in targets() if t.name not in free}
    return Question(
        config(),
        targets(),
        groups,
        fixed,
        {t.name: {name: made_up(t, name) for name in ("F32", "MXFP4", *LADDER)} for t in targets()},
        limits_of(asked.budget, config()),
        objective,
        lambda target: asked.budget.weights.of(target) or 1.0,
    )


def file_nbytes(types) -> int:
    """What the plan's files come to."""
    return make_plan(
        name="asked",
        form=target_form(config(), Layout.FORK),
        config=config(),
        targets=targets(),
        types=types,
        key_values=[text("general.architecture", "deepseek41")],
        shard_nbytes=1 << 20,
    ).nbytes
