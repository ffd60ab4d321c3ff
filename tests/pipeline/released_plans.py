"""Plans and budgets of the released model at full size, for tests that need no weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pipeline.budget import Budget, NotCarried, budget_of, not_carried, plan_items, source_items
from pipeline.gguf.keys import text
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.targets.draft import draft_form, draft_model, draft_tensors
from pipeline.model.targets.trunk import cut_model, target_form, target_tensors
from pipeline.plan import Plan, make_plan
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import load_recipe

ROOT = Path(__file__).parents[2]


@cache
def released_config(release: str = "v4.1-flash") -> ModelConfig:
    path = ROOT / f"tests/data/deepseek-{release}.config.json"
    return read_config(json.loads(path.read_bytes()))


def config_for(recipe_name: str) -> ModelConfig:
    """The model that a shipped recipe is for."""
    return released_config("v4-flash-0731" if recipe_name.startswith("v4-") else "v4.1-flash")


@cache
def released_plan(recipe_name: str, layout: Layout = Layout.FORK) -> Plan:
    recipe = load_recipe(ROOT / f"recipes/{recipe_name}.toml")
    config = config_for(recipe_name)
    n_keep = recipe.experts.n_keep
    keep = (tuple(range(n_keep)),) * config.n_layers if n_keep else None
    targets = target_tensors(config, layout, keep)
    return make_plan(
        name=f"model-{recipe_name}",
        form=target_form(config, layout),
        config=cut_model(config, keep),
        targets=targets,
        types=resolve_types(recipe, targets, weighted=lambda _: recipe.imatrix.required),
        key_values=[text("general.architecture", "deepseek41")],
        shard_nbytes=recipe.output.shard_nbytes,
    )


@cache
def released_draft_plan(recipe_name: str) -> Plan:
    recipe = load_recipe(ROOT / f"recipes/{recipe_name}.toml")
    config = config_for(recipe_name)
    targets = draft_tensors(config)
    return make_plan(
        name=f"model-{recipe_name}-draft",
        form=draft_form(config),
        config=draft_model(config),
        targets=targets,
        types=resolve_types(recipe, targets),
        key_values=[text("general.architecture", "dflash")],
        shard_nbytes=recipe.output.shard_nbytes,
    )


@cache
def source_budget() -> tuple[Budget, tuple[NotCarried, ...]]:
    """The checkpoint as a step, and what a target file leaves out of it."""
    config = released_config()
    specs, targets = expected_tensors(config), target_tensors(config, Layout.FORK)
    return budget_of("source", source_items(config, specs, targets)), not_carried(specs, targets)


@cache
def plan_budget(recipe_name: str, layout: Layout = Layout.FORK) -> Budget:
    return budget_of("plan", plan_items(released_plan(recipe_name, layout)))
