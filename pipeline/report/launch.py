"""How engines are told to load the files of a plan: the words after the program's name.

Sources: llama.cpp pull requests 25173 and 25784 (``draft-dspark``), its ``--lazy-mode`` for the
engram table, ik_llama.cpp pull request 2455, and the serving notes of midagedev/rig-log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.form import V4_TARGET, V41_FORK, V41_MAINLINE, Form
from pipeline.plan import Plan

_LLAMA_CPP = "llama.cpp"
_LAZY = ("--lazy-mode", "auto")
"""Rows of the engram table are read when they are asked for, not with the file."""

_EXPERTS_IN_RAM = ("-ot", "exps=CPU")


@dataclass(frozen=True, slots=True)
class _Engine:
    name: str
    words: tuple[str, ...]
    takes_draft: bool = True


_ENGINES: Mapping[Form, tuple[_Engine, ...]] = {
    V41_MAINLINE: (_Engine(f"{_LLAMA_CPP} b11870 and newer", (*_LAZY, *_EXPERTS_IN_RAM)),),
    V41_FORK: (
        _Engine("the V4.1 branches of llama.cpp", (*_LAZY, *_EXPERTS_IN_RAM)),
        _Engine("ik_llama.cpp since pull request 2455", _EXPERTS_IN_RAM, takes_draft=False),
    ),
    V4_TARGET: (_Engine(f"{_LLAMA_CPP} since pull request 25784", _EXPERTS_IN_RAM),),
}


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
    return tuple(_line(engine, target, draft) for engine in _ENGINES[target.form])


def _line(engine: _Engine, target: Plan, draft: Plan | None) -> LaunchLine:
    words = ("llama-server", "-m", target.shards[0].file_name, *engine.words)
    if draft is not None and engine.takes_draft:
        words += (
            *("-md", draft.shards[0].file_name, "--spec-type", "draft-dspark"),
            *("--spec-draft-n-max", str(target.config.draft.block_size), "--fit", "off"),
        )
    return LaunchLine(engine.name, words)
