"""How engines are told to load the files of a plan: the words after the program's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.model.engines import Engine, engines_of
from pipeline.plan import Plan


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """A command line for one engine, word by word."""

    engine: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def launch_lines(plans: Sequence[Plan]) -> tuple[LaunchLine, ...]:
    """One line per engine that reads the target among ``plans``; none for a draft alone."""
    target = next((plan for plan in plans if not plan.form.is_draft), None)
    draft = next((plan for plan in plans if plan.form.is_draft), None)
    if target is None:
        return ()
    able = engines_of(target.form, (tensor.type for tensor in target.tensors))
    return tuple(_line(engine, target, draft) for engine in able)


def _line(engine: Engine, target: Plan, draft: Plan | None) -> LaunchLine:
    words = ("llama-server", "-m", target.shards[0].file_name, *engine.words)
    if draft is not None and engine.takes_draft:
        words += (
            *("-md", draft.shards[0].file_name, "--spec-type", "draft-dspark"),
            *("--spec-draft-n-max", str(target.config.draft.block_size), "--fit", "off"),
        )
    return LaunchLine(engine.name, words)
