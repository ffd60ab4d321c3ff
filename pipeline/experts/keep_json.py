"""Keep lists as JSON: one byte form for each list, and the digest that names it.

Layers are keyed by number, as in the lists that other tools write, so either side reads the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.digest import canonical_json, spec_digest
from pipeline.errors import SourceError
from pipeline.experts.choice import Choice, Places
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.located import located
from pipeline.experts.origin import Origin
from pipeline.files import write_whole
from pipeline.source.json_object import read_json_object, shown

FORMAT = "expert-keep/1"
"""Changes when the same file would mean another list."""


def keep_spec(keep: KeepList) -> dict[str, object]:
    """Everything that ``keep`` says, as JSON values."""
    return {
        "format": FORMAT,
        "source_experts": keep.n_experts,
        "keep_experts": keep.n_kept,
        "top_k": keep.top_k,
        "honesty": str(keep.honesty),
        "choices": [_choice_spec(choice) for choice in keep.choices],
        "layers": {str(layer): list(ids) for layer, ids in enumerate(keep.layers)},
    }


def keep_digest(keep: KeepList) -> str:
    """The identity of a keep list: its experts and how they were chosen, whatever files are called.

    Digests of the origins count, their names do not.
    """
    choices = [
        spec | {"origins": [origin.sha256 for origin in choice.origins]}
        for choice in keep.choices
        for spec in [_choice_spec(choice)]
    ]
    return spec_digest(keep_spec(keep) | {"choices": choices})


def write_keep(path: Path, keep: KeepList) -> None:
    """Put ``keep`` under ``path``: the same list gives the same bytes.

    Raises:
        OutputError: It cannot be written.
    """
    write_whole(path, canonical_json(keep_spec(keep)) + b"\n")


def read_keep_json(path: Path) -> KeepList:
    """A keep list that `write_keep` wrote.

    Raises:
        SourceError: The file is not JSON of this form, or contradicts itself.
        PlanError: The list breaks a rule; several raise `Problems`.
    """
    entries, _ = read_json_object(path)
    return parse_keep(entries, path)


def parse_keep(entries: Mapping[str, object], path: Path) -> KeepList:
    """The keep list that the JSON object ``entries`` of ``path`` is; raises as `read_keep_json`."""
    if entries.get("format") != FORMAT:
        raise SourceError(
            "the keep list has another format",
            file=path,
            expected=FORMAT,
            found=shown(entries.get("format")),
        )
    try:
        fields = (
            _integer(entries["source_experts"]),
            _integer(entries["top_k"]),
            tuple(_layers(entries["layers"])),
            tuple(_choice(spec) for spec in _list(entries["choices"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the keep list is not of the form {FORMAT}", file=path, found=shown(error)
        ) from None
    with located(path):
        keep = KeepList(*fields)
        _check_summary(entries, keep)
    return keep


def _check_summary(entries: Mapping[str, object], keep: KeepList) -> None:
    """What the file says twice must be the same: a hand that changed one must change the other."""
    for key, value in keep_spec(keep).items():
        if entries.get(key) != value:
            raise SourceError(
                f"the keep list contradicts itself in {key}",
                expected=shown(value),
                found=shown(entries.get(key)),
            )


def _choice_spec(choice: Choice) -> dict[str, object]:
    return {
        "kind": choice.kind,
        "honesty": str(choice.honesty),
        "criterion": choice.criterion and str(choice.criterion),
        "source_experts": choice.n_experts,
        "keep_experts": choice.n_kept,
        "tokens": choice.tokens,
        "origins": [{"name": o.name, "sha256": o.sha256} for o in choice.origins],
        "forced": [list(place) for place in choice.forced],
        "protected": [list(place) for place in choice.protected],
    }


def _choice(spec: object) -> Choice:
    fields = _table(spec)
    criterion, tokens = fields["criterion"], fields["tokens"]
    return Choice(
        kind=_text(fields["kind"]),
        honesty=Honesty(_text(fields["honesty"])),
        criterion=None if criterion is None else Criterion(_text(criterion)),
        n_experts=_integer(fields["source_experts"]),
        n_kept=_integer(fields["keep_experts"]),
        origins=tuple(map(_origin, _list(fields["origins"]))),
        tokens=None if tokens is None else _integer(tokens),
        forced=_places(fields["forced"]),
        protected=_places(fields["protected"]),
    )


def _origin(value: object) -> Origin:
    fields = _table(value)
    return Origin(_text(fields["sha256"]), _text(fields["name"]))


def _places(value: object) -> Places:
    pairs = [_list(pair) for pair in _list(value)]
    return tuple((_integer(layer), _integer(expert)) for layer, expert in pairs)


def _layers(value: object) -> list[tuple[int, ...]]:
    lists = _table(value)
    if lists.keys() != {str(n) for n in range(len(lists))}:
        raise TypeError("layers are not numbered from 0 without a gap")
    return [tuple(map(_integer, _list(lists[str(n)]))) for n in range(len(lists))]


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is not an object")
    return value


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError(f"{shown(value)} is not a list")
    return value


def _integer(value: object) -> int:
    if type(value) is not int:  # JSON's true is an int in Python
        raise TypeError(f"{shown(value)} is not a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    return value
