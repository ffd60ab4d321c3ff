"""One recipe for everything that a diagnosis would take from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pipeline.diagnosis.finding import Finding, Graft, ranges

_Layers = tuple[int, ...] | None


def repair_recipe(findings: Iterable[Finding]) -> str | None:
    """The TOML of a recipe that keeps all but the grafts of ``findings``; nothing without any."""
    grafts = tuple(dict.fromkeys(graft for f in findings if f.mend for graft in f.mend.grafts))
    if not grafts:
        return None
    lines = ['extends = "as-is"']
    for layers in dict.fromkeys(graft.layers for graft in grafts):
        members = [graft for graft in grafts if graft.layers == layers]
        lines += ["", "[[graft]]", 'from = "original"', *_selection(members, layers)]
    for kind, layers in dict.fromkeys((graft.type, graft.layers) for graft in grafts):
        members = [graft for graft in grafts if (graft.type, graft.layers) == (kind, layers)]
        lines += ["", "[[override]]", *_selection(members, layers), f'type = "{kind}"']
    return "\n".join(lines) + "\n"


def _selection(grafts: Iterable[Graft], layers: _Layers) -> Iterator[str]:
    yield f"sub_roles = {json.dumps([graft.sub_role.value for graft in grafts])}"
    if layers is not None:
        yield f'layers = "{ranges(layers)}"'
