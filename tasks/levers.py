"""The lever table of any recipes on any machine: `scripts/levers RECIPE... --source DIR`.

Plans are made from headers. Sizes depend neither on which experts stay nor on an importance matrix
or another source, so recipes that need one of these are planned without.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from pipeline.errors import PlanError, QuantmillError
from pipeline.gguf.keys import text
from pipeline.model.config import ModelConfig
from pipeline.model.targets.trunk import cut_model, target_form, target_tensors
from pipeline.plan import Plan, make_plan
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import DraftMode
from pipeline.report.levers import (
    MACHINES,
    Lever,
    Machine,
    lever_table,
    planned,
    with_fewer_used,
    with_mean_bpw,
)
from pipeline.report.tables import render_text
from pipeline.report.units import GB
from tasks.model_source import ModelSource, SourceParameters
from tasks.recipe_file import read_recipe
from tasks.request import store_of

Number = TypeVar("Number", int, float)

MEAN_BPW = (3.0, 2.4)
"""Mean sizes of experts that are asked about most."""


def main(words: Sequence[str] | None = None) -> int:
    """Print the table that the command line asks for; the exit code."""
    asked = _parser().parse_args(words)
    try:
        levers = list(_levers(asked, _model(asked.source)))
    except QuantmillError as error:
        sys.stderr.write(f"levers: {error}\n")
        return 1
    sys.stdout.write(render_text(lever_table(levers, machine_of(asked))))
    return 0


def _model(source: str) -> ModelConfig:
    root = store_of("out").root / "sources"
    # A draft has no part in the table, and a folder without one will do.
    return ModelSource(SourceParameters(source, root, draft=DraftMode.DROP)).config


def _levers(asked: argparse.Namespace, config: ModelConfig) -> Iterator[Lever]:
    """The first recipe and what might become of it, then the other recipes."""
    first, *others = map(read_recipe, asked.recipe)
    base = planned(first.name, sized_plan(first, config))
    yield base
    for n_used in dict.fromkeys(_fewer_used(asked.ser, config)):
        yield with_fewer_used(base, n_used, config.n_experts_used)
    for n_keep in _fewer_kept(asked.experts, config, first):
        plan = sized_plan(first, config, n_keep)
        yield planned(first.name, plan, f"{n_keep} of {config.n_experts} experts")
    for bpw in MEAN_BPW if asked.bpw is None else asked.bpw:
        yield with_mean_bpw(base, bpw)
    for recipe in others:
        yield planned(recipe.name, sized_plan(recipe, config))


def sized_plan(recipe: Recipe, config: ModelConfig, n_keep: int | None = None) -> Plan:
    """The target of ``recipe`` for its sizes alone: metadata is left out, any experts will do.

    Args:
        recipe: The recipe.
        config: The model before experts are cut.
        n_keep: Experts that stay in each layer; None means what the recipe is made for.
    """
    layout, n_keep = recipe.output.layout, n_keep or recipe.experts.n_keep
    kept = (tuple(range(n_keep)),) * config.n_layers if n_keep else None
    targets = target_tensors(config, layout, kept)
    return make_plan(
        name=recipe.name,
        form=target_form(config, layout),
        config=cut_model(config, kept),
        targets=targets,
        types=resolve_types(recipe, targets, weighted=lambda _: True),
        key_values=[text("general.name", recipe.name)],
        shard_nbytes=recipe.output.shard_nbytes,
    )


def _fewer_used(asked: Sequence[int] | None, config: ModelConfig) -> Sequence[int]:
    most = config.n_experts_used
    return _within("--ser", asked, range(most - 1, most // 2 - 1, -1), (1, most - 1))


def _fewer_kept(asked: Sequence[int] | None, config: ModelConfig, recipe: Recipe) -> Sequence[int]:
    most = recipe.experts.n_keep or config.n_experts
    default = () if recipe.experts.n_keep else (config.n_experts * 2 // 3,)
    return _within("--experts", asked, default, (config.n_experts_used, most - 1))


def _within(
    option: str, asked: Sequence[int] | None, default: Sequence[int], limits: tuple[int, int]
) -> Sequence[int]:
    for number in asked or ():
        if not limits[0] <= number <= limits[1]:
            raise PlanError(
                f"{option} does not suit this model and recipe",
                expected="{} to {}".format(*limits),
                found=number,
            )
    return default if asked is None else asked


def machine_of(asked: argparse.Namespace) -> Machine:
    """The named machine with the numbers that the command line puts in their place."""
    given = {
        field: round(value * unit) if field.endswith("nbytes") else value * unit
        for field, unit in _UNITS.items()
        if (value := getattr(asked, field)) is not None
    }
    machine = MACHINES[asked.machine]
    return replace(machine, name=f"{machine.name}, changed", **given) if given else machine


_UNITS = {
    "vram_nbytes": GB,
    "kv_nbytes": GB,
    "reserve_nbytes": GB,
    "dense_nbytes": GB,
    "bandwidth": GB,
    "constant_s": 1e-3,
}
"""Fields of a machine -> what the command line counts them in."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/levers", description=__doc__)
    parser.add_argument("recipe", nargs="+", help="shipped recipes or TOML files, the base first")
    parser.add_argument("--source", required=True, help="a checkpoint folder or owner/name@commit")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--machine", choices=MACHINES, default="assumed", help="(assumed)")
    for option, field, what in (
        ("--vram", "vram_nbytes", "usable VRAM, GB"),
        ("--kv", "kv_nbytes", "KV cache, GB"),
        ("--reserve", "reserve_nbytes", "compute buffers, contexts and margins, GB"),
        ("--dense", "dense_nbytes", "what every token reads whole, GB"),
        ("--bandwidth", "bandwidth", "RAM, GB/s"),
        ("--constant", "constant_s", "time of a token besides RAM, ms"),
    ):
        kind = _amount if field.endswith("nbytes") else _positive
        machine.add_argument(option, dest=field, type=kind, metavar="N", help=what)
    supposed = parser.add_argument_group("what if, of the first recipe; '' for none")
    supposed.add_argument("--ser", type=_list_of(_count), help="experts used, as 5,4,3")
    supposed.add_argument("--experts", type=_list_of(_count), help="experts kept, as 256")
    supposed.add_argument(
        "--bpw", type=_list_of(_positive), help="mean bits per weight, as 3.0,2.4"
    )
    return parser


def _amount(word: str) -> float:
    """A finite number from 0 on."""
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r} is no number from 0 on")
    return number


def _positive(word: str) -> float:
    number = _amount(word)
    if not number:
        raise argparse.ArgumentTypeError("0 does not make sense here")
    return number


def _count(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number")
    return int(word)


def _list_of(kind: Callable[[str], Number]) -> Callable[[str], tuple[Number, ...]]:
    def numbers(words: str) -> tuple[Number, ...]:
        return tuple(kind(word) for word in words.split(",")) if words else ()

    return numbers


if __name__ == "__main__":
    sys.exit(main())
