"""Which stored tensors must be there, and whether they are: the whole model, or its draft alone."""

from __future__ import annotations

from dataclasses import replace

from pipeline.errors import SourceError, raise_problems
from pipeline.model.config import DRAFT_PREFIX, ModelConfig
from pipeline.model.expected.tensors import expected_tensors
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import CONFIG_NAME, Checkpoint
from pipeline.source.scope import WHOLE, Scope
from pipeline.source.spec import TensorSpec

DRAFT_OPTIONAL = Scope(optional=DRAFT_PREFIX)
"""The whole model, whose draft may be absent."""

DRAFT_ONLY = Scope(only=DRAFT_PREFIX)
"""The draft and nothing else."""


def wanted_tensors(config: ModelConfig, scope: Scope = WHOLE) -> tuple[TensorSpec, ...]:
    """Name, dtype and shape of every tensor of ``scope`` that config.json implies."""
    return tuple(spec for spec in expected_tensors(config) if scope.covers(spec.name))


def require_tensors(
    checkpoint: Checkpoint, config: ModelConfig, scope: Scope = WHOLE
) -> tuple[TensorSpec, ...]:
    """The stored tensors of ``scope``, once index, shards and config agree on all of them.

    A draft of which nothing is there is one problem, or none where it is optional; a draft of
    which something is there has to be whole.

    Raises:
        SourceError: One disagreement.
        Problems: Several.
    """
    specs = wanted_tensors(config, scope)
    problems: list[SourceError] = []
    if not _holds_draft(checkpoint):
        draft = [spec for spec in specs if _is_of_draft(spec.name)]
        specs = tuple(spec for spec in specs if not _is_of_draft(spec.name))
        problems = [] if scope.optional else [_no_draft(checkpoint, config, len(draft), scope)]
        # The index may count what was left out.
        checkpoint = replace(checkpoint, total_size=None)
    problems += check_agreement(checkpoint, specs)
    raise_problems(f"checkpoint {checkpoint.folder}", problems)
    return specs


def _holds_draft(checkpoint: Checkpoint) -> bool:
    listed = any(map(_is_of_draft, checkpoint.weight_map))
    return listed or any(any(map(_is_of_draft, f.tensors)) for f in checkpoint.files.values())


def _is_of_draft(name: str) -> bool:
    return name.startswith(DRAFT_PREFIX)


def _no_draft(
    checkpoint: Checkpoint, config: ModelConfig, n_tensors: int, scope: Scope
) -> SourceError:
    last = config.draft.n_stages - 1
    step = "Fetch the shards that hold it, or name a second source that does (--supplement)"
    without = "" if scope.only else '; [draft] mode = "drop" does without it'
    return SourceError(
        "the checkpoint holds no draft, but config.json describes one",
        file=checkpoint.path(CONFIG_NAME),
        expected=f"{n_tensors:,} tensors {DRAFT_PREFIX}0.* to {DRAFT_PREFIX}{last}.*",
        found="none",
        next_step=f"{step}{without}.",
    )
