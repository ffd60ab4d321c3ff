"""Keep lists that others wrote: only ids, in JSON, JSON lines or CSV.

Read are {"0": [ids], ...} and {"layers": {"0": [ids], ...}}, in one object or one a line
(vLLM-Ascend pull request 12525), vLLM's {"pruned_experts": [[layer, id], ...]} (pull request
42613), which names those that go, and CSV with a column for the layer, one for the expert and
perhaps one ``kept``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.errors import PlanError, SourceError
from pipeline.experts.choice import Choice
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.layers import check_layers
from pipeline.experts.keep import KeepList, check_fits
from pipeline.experts.located import located
from pipeline.experts.origin import origin_of
from pipeline.experts.routing import Routing
from pipeline.source.json_object import parse_json_object, shown

KIND = "keep-list"

_PRUNED = "pruned_experts"
_LAYERS = "layers"
_COLUMNS = {
    "layer": ("layer", "layer_id", "layer_idx"),
    "expert": ("expert", "expert_id", "old_expert_id", "original_expert_id"),
}
_TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_MOST_DIGITS = 9

Lists = Mapping[int, Sequence[int]]


def keep_of_lists(
    lists: Lists, routing: Routing, path: Path, *, n_best: int | None = None
) -> KeepList:
    """A keep list of ids by layer, held against the model it is for.

    Args:
        lists: The ids of each layer.
        routing: The model.
        path: Where the lists were read.
        n_best: The lists are rankings, best first: keep this many of each.

    Raises:
        SourceError: A layer is missing, or a ranking is asked for and the lists are none.
        PlanError: The list breaks a rule or does not fit the model; several raise `Problems`.
    """
    check_layers(lists, path)
    if n_best is not None:
        lists = _best(lists, n_best, path)
    layers = tuple(tuple(sorted(lists[layer])) for layer in range(len(lists)))
    choice = Choice(
        kind=KIND,
        honesty=Honesty.LIST_ONLY,
        criterion=None,
        n_experts=routing.n_experts,
        n_kept=len(layers[0]),
        origins=(origin_of(path),),
    )
    with located(path):
        keep = KeepList(routing.n_experts, routing.top_k, layers, (choice,))
        check_fits(keep, routing)
    return keep


def lists_of_json(entries: Mapping[str, object], routing: Routing, path: Path) -> Lists:
    """Ids by layer out of one JSON object.

    Raises:
        SourceError: It is none of the known forms.
    """
    if _PRUNED in entries:
        return _complement(entries[_PRUNED], routing, path)
    inner = entries.get(_LAYERS, entries)
    if not isinstance(inner, dict) or not inner:
        raise SourceError("the file holds no lists of experts", file=path, found=shown(inner))
    return {_number(key, "a layer", path): _ids(key, ids, path) for key, ids in inner.items()}


def lists_of_lines(text: bytes, routing: Routing, path: Path) -> Lists:
    """Ids by layer out of JSON objects, one a line.

    Raises:
        SourceError: A line is none of the known forms, or a layer stands twice.
    """
    found: dict[int, Sequence[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        lists = lists_of_json(parse_json_object(line, path, f"line {number}"), routing, path)
        for layer, ids in lists.items():
            if layer in found:
                raise SourceError(f"layer {layer} stands twice", file=path, found=f"line {number}")
            found[layer] = ids
    return found


def lists_of_csv(text: str, path: Path) -> Lists:
    """Ids by layer out of CSV: one expert a row; where there is a column ``kept``, those it keeps.

    Raises:
        SourceError: A column is missing, or a row is damaged.
    """
    rows = csv.DictReader(io.StringIO(text), strict=True, restval="")
    found: dict[int, list[int]] = {}
    try:
        columns = {name: _column(name, rows.fieldnames or (), path) for name in _COLUMNS}
        for row in rows:
            layer = _number(row[columns["layer"]], f"line {rows.line_num}: the layer", path)
            expert = _number(row[columns["expert"]], f"line {rows.line_num}: the expert", path)
            kept = found.setdefault(layer, [])
            if _is_kept(row, rows.line_num, path):
                kept.append(expert)
    except csv.Error as error:
        raise SourceError("the CSV is damaged", file=path, found=shown(error)) from None
    return found


def _is_kept(row: Mapping[str, str], line: int, path: Path) -> bool:
    said = row.get("kept", "yes").strip().lower()
    if said not in _TRUTHS:
        raise SourceError(f"line {line}: kept is neither yes nor no", file=path, found=shown(said))
    return _TRUTHS[said]


def _column(name: str, columns: Sequence[str], path: Path) -> str:
    found = [column for column in columns if column in _COLUMNS[name]]
    if len(found) != 1:
        raise SourceError(
            f"the CSV has no one column for the {name}",
            file=path,
            expected=" or ".join(_COLUMNS[name]),
            found=shown(", ".join(columns)),
        )
    return found[0]


def _complement(pairs: object, routing: Routing, path: Path) -> Lists:
    """What stays where ``pairs`` of layer and expert go."""
    pruned: dict[int, set[int]] = {layer: set() for layer in range(routing.n_layers)}
    for layer, expert in _pairs(pairs, path):
        if layer >= routing.n_layers or expert >= routing.n_experts or expert in pruned[layer]:
            raise PlanError(
                f"layer {layer}, expert {expert} cannot be pruned",
                file=path,
                expected=f"{routing.n_layers} layers of {routing.n_experts} experts, each once",
            )
        pruned[layer].add(expert)
    every = range(routing.n_experts)
    return {layer: [e for e in every if e not in gone] for layer, gone in pruned.items()}


def _pairs(pairs: object, path: Path) -> Iterator[tuple[int, int]]:
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        ids = _ids(_PRUNED, pair, path)
        if len(ids) != 2:
            raise SourceError(
                f"{_PRUNED} holds something else than [layer, expert]", file=path, found=shown(pair)
            )
        yield ids[0], ids[1]


def _best(lists: Lists, n_best: int, path: Path) -> Lists:
    if all(list(ids) == sorted(ids) for ids in lists.values()):
        raise SourceError(
            "the lists are in order of index, so they rank nothing",
            file=path,
            expected=f"ids best first, of which {n_best} are kept",
        )
    return {layer: ids[:n_best] for layer, ids in lists.items()}


def _number(value: object, what: str, path: Path) -> int:
    text = str(value).strip()
    is_plain = text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS
    if not is_plain or str(int(text)) != text:  # 00 beside 0 would be one layer twice
        raise SourceError(f"{what} is not a number", file=path, found=shown(value))
    return int(text)


def _ids(key: str, ids: object, path: Path) -> Sequence[int]:
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise SourceError(f"{key} does not hold a list of ids", file=path, found=shown(ids))
    return ids
