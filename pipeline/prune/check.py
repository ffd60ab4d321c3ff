"""A cut checkpoint held against its source by another path than the one that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.digest import sha256
from pipeline.errors import VerifyError
from pipeline.experts.recover import recover_keep
from pipeline.experts.routing import routing_of
from pipeline.model.config import read_config
from pipeline.model.presence import DRAFT_OPTIONAL, require_tensors
from pipeline.prune.config_json import config_bytes
from pipeline.prune.plan import PrunedPlan
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import read_source_file


def check_pruned(
    source: Checkpoint, plan: PrunedPlan, entries: Mapping[str, object], folder: Path
) -> None:
    """Whether the files in ``folder`` are the checkpoint that ``entries`` describe, rightly cut.

    Headers are read anew and held against the description; which experts are there is read from
    the bytes of the routers, and of an expert in each layer.

    Args:
        source: What was cut.
        plan: How.
        entries: config.json of what is left.
        folder: Where its files lie under their names.

    Raises:
        SourceError: Files and description disagree, or routers and experts do; several raise
            `Problems`.
        VerifyError: Other experts are there than the list says.
    """
    pruned = Checkpoint(
        folder=folder,
        config=entries,
        config_sha256=sha256(config_bytes(entries)),
        index_sha256=None,
        files={file.name: read_source_file(folder / file.name) for file in plan.files},
        weight_map={spec.name: file for file, spec in plan.tensors},
        total_size=plan.tensor_nbytes,
    )
    require_tensors(pruned, read_config(entries), DRAFT_OPTIONAL)
    if plan.keep.n_kept == plan.keep.n_experts:
        return
    found = recover_keep(source, pruned, routing_of(read_config(source.config)))
    for layer, (wanted, ids) in enumerate(zip(plan.keep.layers, found.layers, strict=True)):
        if wanted != ids:
            raise VerifyError(
                f"layer {layer} holds other experts than the keep list says",
                file=folder,
                expected=sorted(set(wanted) - set(ids)),
                found=sorted(set(ids) - set(wanted)),
                next_step="Delete the folder and run the command again.",
            )
