"""Recipes on the command line: `scripts/recipe show|diff|import|export|from`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError, RecipeError
from pipeline.gguf.model_file import read_model
from pipeline.model.layout import Layout
from pipeline.model.targets.tensor import TargetTensor
from pipeline.recipe.dump import recipe_toml
from pipeline.recipe.foreign.reading import import_rules
from pipeline.recipe.foreign.rules import Dialect, read_rules, write_rules
from pipeline.recipe.foreign.writing import rules_of
from pipeline.recipe.from_file import recipe_of_file
from pipeline.recipe.resolve import resolve_types
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.recipe.tables import OutputTable
from pipeline.recipe.values import ALLOWANCES
from pipeline.report.recipe_table import Resolved, difference_table, type_table
from pipeline.report.tables import render_text
from tasks.recipe_file import read_recipe
from tasks.recipe_model import MODELS, model_for, targets_of


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code."""
    asked = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], None] = asked.command
    try:
        command(asked)
    except QuantmillError as error:
        sys.stderr.write(f"recipe: {error}\n")
        return 1
    return 0


def show(asked: argparse.Namespace) -> None:
    """Print a recipe in full and, of a model, the types that come of it."""
    recipe = read_recipe(asked.recipe)
    parts = [recipe_toml(recipe)]
    if asked.source and recipe.makes_target:
        targets = targets_of(asked.source, recipe)
        parts.append(render_text(type_table(*_resolved(recipe, targets))))
    sys.stdout.write("\n".join(parts))


def diff(asked: argparse.Namespace) -> None:
    """Print what two recipes say differently and, of a model, what they make different."""
    old, new = map(read_recipe, (asked.old, asked.new))
    before, after = (recipe_toml(one).splitlines() for one in (old, new))
    lines = difflib.unified_diff(before, after, asked.old, asked.new, lineterm="")
    parts = ["".join(f"{line}\n" for line in lines)]
    if asked.source:
        was, now = (_resolved(one, targets_of(asked.source, one)) for one in (old, new))
        parts.append(render_text(difference_table(was, now, (old.name, new.name))))
    sys.stdout.write("\n".join(parts))


def import_(asked: argparse.Namespace) -> None:
    """Print the recipe that another tool's rules come to."""
    is_stdin = asked.rules == "-"
    where = "standard input" if is_stdin else asked.rules
    content = sys.stdin.buffer.read() if is_stdin else files.read_bytes(Path(asked.rules))
    rules = read_rules(_text_of(content, where), name=where)
    name = asked.name or ("imported" if is_stdin else Path(asked.rules).stem)
    base = _base(asked)
    output = base.output if base is not None else OutputTable()
    if asked.layout:
        output = output.model_copy(update={"said_layout": Layout(asked.layout)})
    model = asked.source or (MODELS[0] if base is None else model_for(base))
    targets = targets_of(model, layout=output.said_layout)
    found = import_rules(rules, targets, name=name, base=base, output=output)
    allow = tuple(dict.fromkeys((*found.recipe.allow, *asked.allow)))
    recipe = found.recipe.model_copy(update={"allow": allow})
    _say(found.notes)
    # Read back, so that what is printed is what will be read: a name may not do, for one.
    text = recipe_toml(recipe)
    _resolvable(parse_recipe(text.encode(), Path(f"{name}.toml")), targets)
    sys.stdout.write(text)


def export(asked: argparse.Namespace) -> None:
    """Print the types of a recipe as another tool's rules."""
    recipe = read_recipe(asked.recipe)
    targets = targets_of(asked.source or model_for(recipe), recipe)
    rules = rules_of(*_resolved(recipe, targets))
    sys.stdout.write(write_rules(rules, Dialect(asked.to)))


def from_(asked: argparse.Namespace) -> None:
    """Print the recipe of a finished GGUF."""
    found = recipe_of_file(read_model(Path(asked.file)))
    origin = "stored in the file" if found.is_recorded else "told from the types of its tensors"
    _say((origin, *found.notes))
    sys.stdout.write(recipe_toml(found.recipe))


def _resolved(recipe: Recipe, targets: Sequence[TargetTensor]) -> Resolved:
    """Tensors with their types, as if there were the importance matrix that some may need."""
    return targets, resolve_types(recipe.without_budget(), targets, weighted=lambda _: True)


def _resolvable(recipe: Recipe, targets: Sequence[TargetTensor]) -> None:
    """Tell on the side what stands in the way of a recipe that was made of foreign rules."""
    try:
        _resolved(recipe, targets)
    except QuantmillError as error:
        _say([f"as it stands it cannot be run: {error}"])


def _base(asked: argparse.Namespace) -> Recipe | None:
    """The recipe that says what the rules do not, if there is one."""
    if asked.base:
        return read_recipe(asked.base)
    if not asked.rest:
        return None
    roles = "".join(
        f'{role} = "{asked.rest}"\n'
        for role in ("routed", "engram", "attention", "embedding", "shared")
    )
    return parse_recipe(f"[roles]\n{roles}".encode(), Path("rest.toml"))


def _text_of(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RecipeError("the rules are not UTF-8 text", file=where, offset=error.start) from error


def _say(notes: Iterable[str]) -> None:
    sys.stderr.writelines(f"# {note}\n" for note in notes)


def _add_source(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(MODELS)
    parser.add_argument(
        "--source",
        metavar="SOURCE",
        help=f"a checkpoint folder, a GGUF, or a released model: {known}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/recipe", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="show|diff|import|export|from")

    one = commands.add_parser("show", help="a recipe in full, and its types")
    one.add_argument("recipe", help="name or file")
    _add_source(one)
    one.set_defaults(command=show)

    one = commands.add_parser("diff", help="what two recipes make different")
    one.add_argument("old", help="name or file")
    one.add_argument("new", help="name or file")
    _add_source(one)
    one.set_defaults(command=diff)

    one = commands.add_parser("import", help="rules of another tool as a recipe")
    one.add_argument("rules", help="a file of pattern=type rules, or - for standard input")
    one.add_argument("--name", help="name of the recipe; the file's without it")
    rest = one.add_mutually_exclusive_group()
    rest.add_argument("--base", metavar="RECIPE", help="says what the rules leave open")
    rest.add_argument("--rest", metavar="TYPE", help="the type of what the rules leave open")
    one.add_argument("--layout", choices=list(Layout), help="whose names the rules use")
    one.add_argument("--allow", action="append", default=[], choices=list(ALLOWANCES))
    _add_source(one)
    one.set_defaults(command=import_)

    one = commands.add_parser("export", help="the types of a recipe as rules of another tool")
    one.add_argument("recipe", help="name or file")
    one.add_argument("--to", choices=list(Dialect), required=True)
    _add_source(one)
    one.set_defaults(command=export)

    one = commands.add_parser("from", help="the recipe of a finished GGUF")
    one.add_argument("file", help="a GGUF, one of its shards, or its folder")
    one.set_defaults(command=from_)
    return parser


if __name__ == "__main__":
    sys.exit(main())
