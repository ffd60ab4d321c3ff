"""What the converter makes of a checkpoint, for the reference to read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.promises.whole_job import run_job

F32 = dict.fromkeys(("routed", "engram", "attention", "embedding", "shared"), "F32")
"""Roles of a recipe that loses nothing."""

F32_DRAFT = dict.fromkeys(
    (
        "routed",
        "attention",
        "shared",
        "hyper_connection",
        "router",
        "draft_input",
        "markov",
        "confidence",
    ),
    "F32",
)
"""The same for the draft."""


class Conversion(NamedTuple):
    """The target's shards in their order, and the draft's file."""

    trunk: list[Path]
    draft: Path


def converted(
    checkpoint: Path, folder: Path, roles: Mapping[str, str] = F32, layout: str = "mainline"
) -> Conversion:
    """What a recipe of these roles makes, with a draft in F32 beside it."""
    tables = {
        "roles": roles,
        "sub_roles": dict.fromkeys(("engram_gate", "hyper_connection", "router"), "F32"),
        "draft": F32_DRAFT,
        "output": {"layout": layout},
    }
    lines = ['allow = ["larger_than_fp4"]']
    for name, table in tables.items():
        lines += [f"[{name}]", *(f'{key} = "{value}"' for key, value in table.items())]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(lines))
    outcome = run_job(checkpoint, folder / "out", recipe)
    assert outcome.ok, outcome.text
    files = sorted(folder.glob("out/*/*.gguf"))
    (draft,) = (file for file in files if "-draft-" in file.name)
    return Conversion([file for file in files if file != draft], draft)
