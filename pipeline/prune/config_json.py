"""config.json and index of a checkpoint that lost experts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pipeline.errors import PlanError
from pipeline.experts.keep import KeepList
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.targets.trunk import cut_model
from pipeline.prune.plan import PrunedPlan

_COUNT = "n_routed_experts"
_TEXT = "text_config"


def cut_config(
    entries: Mapping[str, object], config: ModelConfig, keep: KeepList
) -> dict[str, object]:
    """config.json with the number of experts that are left, wherever it says how many there are.

    Args:
        entries: config.json of the source, parsed.
        config: What it describes.
        keep: The experts that stay.

    Raises:
        PlanError: The new one would describe more of the model differently.
    """
    cut = dict(entries)
    if _COUNT in cut:
        cut[_COUNT] = keep.n_kept
    text = cut.get(_TEXT)
    if isinstance(text, dict) and _COUNT in text:
        cut[_TEXT] = {**text, _COUNT: keep.n_kept}
    if read_config(cut) != cut_model(config, keep.layers):
        raise PlanError(
            f"config.json counts more than the trunk's experts by {_COUNT}",
            next_step="Checkpoints whose draft counts its experts with the trunk's cannot be cut.",
        )
    return cut


def config_bytes(entries: Mapping[str, object]) -> bytes:
    """config.json in the form of the V4.1 release: its keys in their order, two blanks a level."""
    return (json.dumps(entries, indent=2, ensure_ascii=False) + "\n").encode()


def index_bytes(plan: PrunedPlan) -> bytes:
    """The index: bytes of all tensors, and the file of each."""
    where = {spec.name: file for file, spec in plan.tensors}
    index = {"metadata": {"total_size": plan.tensor_nbytes}, "weight_map": where}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
