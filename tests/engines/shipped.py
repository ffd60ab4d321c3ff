"""Recipes that come along, made of the default miniatures in the layout that engines read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from pipeline.experts.choice import Choice
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import write_keep
from pipeline.miniature.size import MiniatureSize
from pipeline.model.layout import Layout
from pipeline.model.targets.trunk import target_tensors
from tasks.model_source import ModelSource, SourceParameters
from tasks.recipe_file import read_recipe
from tests.engines.conversion import Conversion, convert, uniform, write_recipe
from tests.pipeline.importance.writing import write_imatrix

FOLDER = Path(__file__).parents[2] / "recipes"
FOR_IK = ("bpw-2.4", "bpw-3.0", "reap-256-bpw-2.4", "reap-256-bpw-3.0")
"""With types that these engines do not read."""
OF_A_FILE = ("as-is", "served-graft")
"""For a source that is no checkpoint."""
ELSEWHERE = (*FOR_IK, *OF_A_FILE)
RECIPES = sorted(p.stem for p in FOLDER.glob("*.toml") if p.stem not in ELSEWHERE)
DRAFT_ONLY = "draft"
WITH_TARGET = [name for name in RECIPES if name != DRAFT_ONLY]

N_KEPT = {name: {"256": 8, "320": 12}[name.split("-")[1]] for name in RECIPES if "reap" in name}
"""Of a miniature's 16 experts, where the recipe keeps so many of 384 as its name says."""


def is_for_v4(recipe: str) -> bool:
    return recipe.startswith("v4-")


class Shipped:
    """The files of each recipe, and F32 files with the same experts; each made once."""

    def __init__(self, v41: Path, v4: Path, folder: Path) -> None:
        """``v41`` and ``v4`` are miniatures of default size."""
        self._v41, self._v4, self._folder = v41, v4, folder
        self.made = cache(self._made)
        self.exact = cache(self._exact)

    def _made(self, recipe: str) -> Conversion:
        path = self._folder / f"{recipe}.toml"
        content = (FOLDER / path.name).read_text()
        if recipe in N_KEPT:
            n_made_for = recipe.split("-")[1]
            before, after = (f"n_keep = {n}\n" for n in (n_made_for, N_KEPT[recipe]))
            assert before in content
            content = content.replace(before, after)
        path.write_text(content)
        return self._convert(recipe, path, imatrix=self._imatrix(recipe))

    def _imatrix(self, recipe: str) -> str:
        """A matrix of made-up activations, for a recipe that asks for one."""
        if not read_recipe(recipe).imatrix.required:
            return ""
        path = self._folder / "imatrix.gguf"
        if not path.exists():
            config = ModelSource(SourceParameters(str(self._v41), self._folder)).config
            write_imatrix(path, target_tensors(config, Layout.MAINLINE))
        return str(path)

    def _exact(self, recipe: str) -> tuple[Path, ...]:
        model, n_kept = "v4" if is_for_v4(recipe) else "v41", N_KEPT.get(recipe, "all")
        path = self._folder / f"exact-{model}-{n_kept}.toml"
        write_recipe(path, uniform("F32", has_engram=model == "v41"))
        return self._convert(recipe, path).target

    def _convert(self, recipe: str, path: Path, imatrix: str = "") -> Conversion:
        source = self._v4 if is_for_v4(recipe) else self._v41
        keep = self._folder / f"keep-{N_KEPT[recipe]}.json" if recipe in N_KEPT else ""
        if keep:
            write_keep(keep, keep_list(MiniatureSize(), N_KEPT[recipe]))
        words = {"layout": "mainline", "keep": str(keep), "imatrix": imatrix}
        return convert(source, self._folder / "out", path, **words)


def keep_list(size: MiniatureSize, n_kept: int) -> KeepList:
    """Experts drawn by lot, others in each layer, always the same."""
    draw = np.random.default_rng(n_kept)
    layers = tuple(
        tuple(sorted(draw.choice(size.n_experts, n_kept, replace=False).tolist()))
        for _ in range(size.n_layers)
    )
    how = Choice("keep-list", Honesty.LIST_ONLY, None, size.n_experts, n_kept, ())
    return KeepList(size.n_experts, size.n_experts_used, layers, (how,))
