"""The tensors that a recipe is held against: of a source, or of a released model known by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipeline.miniature.released import config_of
from pipeline.model.config import read_config
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import target_tensors
from pipeline.recipe.schema import Recipe
from tasks.open_source import open_source

_RELEASES = {"v4.1": "v4.1-flash", "v4": "v4-flash-0731"}

MODELS = tuple(_RELEASES)
"""Words for the released models, whose shapes are known without a source."""


def model_for(recipe: Recipe) -> str:
    """The released model that a recipe is written for: V4 has no engram to give a type to."""
    is_v4 = recipe.roles is not None and recipe.roles.engram is None
    return MODELS[1] if is_v4 else MODELS[0]


def targets_of(
    source: str, recipe: Recipe | None = None, layout: Layout | None = None
) -> tuple[TargetTensor, ...]:
    """Every tensor of a target file of ``source``, by headers alone.

    Which experts a recipe keeps makes no difference to sizes: the first ones stand for them.

    Args:
        source: A local checkpoint or GGUF, or one of `MODELS`.
        recipe: What gives the layout, where ``layout`` does not, and how many experts stay.
        layout: The layout; where nothing says one, the source's own.

    Raises:
        SourceError: The source cannot be read.
        ConfigError: The model has no file in this layout.
    """
    if layout is None and recipe is not None:
        layout = recipe.output.said_layout
    if source in _RELEASES:
        config = read_config(config_of(_RELEASES[source]))
        return target_tensors(config, layout or Layout.MAINLINE, _kept(recipe, config.n_layers))
    with tempfile.TemporaryDirectory() as root:
        opened = open_source(source, Path(root))
        layout = layout or opened.layout or Layout.MAINLINE
        keep = _kept(recipe, opened.config.n_layers)
        return opened.stored(opened.frame(layout, keep), layout, keep)


def _kept(recipe: Recipe | None, n_layers: int) -> tuple[tuple[int, ...], ...] | None:
    n_keep = None if recipe is None else recipe.experts.n_keep
    return (tuple(range(n_keep)),) * n_layers if n_keep else None
