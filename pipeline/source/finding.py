"""Findings of the agreement check: each broken rule with its wording, counted where alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import SourceError
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.json_object import shown


@dataclass(frozen=True, slots=True)
class Rule:
    """What is wrong when a rule is broken, and what to do about it."""

    what: str
    next_step: str


_SAME_REVISION = "Fetch index and shards from one revision."
_SAME_RELEASE = "Check that config.json and the shards belong to the same release."

MISSING_SHARD = Rule(
    "the index names a shard that is not there", "Fetch it into the checkpoint's folder."
)
UNLISTED_SHARD = Rule(
    "a shard lies in the folder that the index does not name",
    "Move it out of the folder, or fetch the index that belongs to it.",
)
UNLISTED_TENSOR = Rule("a shard holds a tensor that the index does not list", _SAME_REVISION)
PHANTOM = Rule("the index lists a tensor that no shard holds", _SAME_REVISION)
TWICE = Rule(
    "two shards hold the same tensor", "Remove the shard that belongs to another download."
)
MOVED = Rule("a tensor is in another shard than the index says", _SAME_REVISION)
MISSING = Rule("config.json asks for a tensor that is nowhere in the checkpoint", _SAME_RELEASE)
ABSENT = Rule(
    "config.json asks for a part of the model that is nowhere in the checkpoint",
    "Fetch the shard that holds it; config.json must be of the same release.",
)
EXPERTS = Rule(
    "a block has another number of experts than config.json says",
    "Use the config.json of these shards; a draft may count its experts apart from the trunk's "
    "(dspark_n_routed_experts beside n_routed_experts).",
)
UNEXPECTED = Rule("the checkpoint holds a tensor that config.json does not imply", _SAME_RELEASE)
WRONG_DTYPE = Rule(
    "a tensor has another dtype than the release",
    "Use the released shards; converted copies are not read.",
)
WRONG_SHAPE = Rule("a tensor has another shape than config.json implies", _SAME_RELEASE)
NO_SCALE = Rule(
    "an FP8 or FP4 weight has no scale",
    "Its codes mean nothing without the tensor that ends in .scale; fetch the released shard.",
)
NO_WEIGHT = Rule("a scale has no weight", "Fetch the released shard; its weight was left out.")
SCALE_BLOCK = Rule(
    "the scales of a weight have another block than config.json says",
    "Use the config.json of this release: weight_block_size differs between releases.",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: the tensors it concerns, where, and what was expected and found.

    ``group`` tells findings apart that are otherwise alike, such as two layers' missing tensors.
    """

    rule: Rule
    names: Sequence[str]
    file: str | None = None
    expected: object = None
    found: object = None
    group: str = ""


def explain(findings: Sequence[Finding], checkpoint: Checkpoint) -> list[SourceError]:
    """The findings as errors, in order; alike ones become one error that says how many."""
    alike: dict[object, list[Finding]] = {}
    for one in findings:
        key = (one.rule.what, one.file, str(one.expected), str(one.found), one.group)
        alike.setdefault(key, []).append(one)
    return [_problem(group, checkpoint) for group in alike.values()]


def _problem(group: Sequence[Finding], checkpoint: Checkpoint) -> SourceError:
    first = group[0]
    n_tensors = sum(len(one.names) for one in group)
    counted = f" ({n_tensors:,} tensors, the first is named)" if n_tensors > 1 else ""
    file_name = first.file or checkpoint.weight_map.get(first.names[0])
    return SourceError(
        first.rule.what + counted,
        file=checkpoint.path(file_name) if file_name else checkpoint.folder,
        tensor=shown(first.names[0]),
        expected=first.expected,
        found=first.found,
        next_step=first.rule.next_step,
    )
