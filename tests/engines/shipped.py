"""Every recipe that comes along, made of the default miniatures in the layout that engines read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from pipeline.experts.choice import Choice
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import write_keep
from pipeline.miniature.size import MiniatureSize
from tests.engines.conversion import Conversion, convert, uniform, write_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml"))
DRAFT_ONLY = "draft"
WITH_TARGET = [name for name in RECIPES if name != DRAFT_ONLY]

N_KEPT = {"reap-256-native": 8, "reap-256-q3": 8, "reap-320-q3": 12}
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
        return self._convert(recipe, path)

    def _exact(self, recipe: str) -> tuple[Path, ...]:
        model, n_kept = "v4" if is_for_v4(recipe) else "v41", N_KEPT.get(recipe, "all")
        path = self._folder / f"exact-{model}-{n_kept}.toml"
        write_recipe(path, uniform("F32", has_engram=model == "v41"))
        return self._convert(recipe, path).target

    def _convert(self, recipe: str, path: Path) -> Conversion:
        source = self._v4 if is_for_v4(recipe) else self._v41
        keep = self._folder / f"keep-{N_KEPT[recipe]}.json" if recipe in N_KEPT else ""
        if keep:
            write_keep(keep, keep_list(MiniatureSize(), N_KEPT[recipe]))
        return convert(source, self._folder / "out", path, layout="mainline", keep=str(keep))


def keep_list(size: MiniatureSize, n_kept: int) -> KeepList:
    """Experts drawn by lot, others in each layer, always the same."""
    draw = np.random.default_rng(n_kept)
    layers = tuple(
        tuple(sorted(draw.choice(size.n_experts, n_kept, replace=False).tolist()))
        for _ in range(size.n_layers)
    )
    how = Choice("keep-list", Honesty.LIST_ONLY, None, size.n_experts, n_kept, ())
    return KeepList(size.n_experts, size.n_experts_used, layers, (how,))
