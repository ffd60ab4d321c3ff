"""Small models in every type, made by recipes, and mixtures of their shards.

A shard holds one group of tensors, so a model that has one group in another type is a set of shards
from two runs, as they were written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import cycle
from pathlib import Path

from pipeline.gguf.model_file import shard_file_name
from pipeline.gguf.reader import read_gguf
from pipeline.miniature.checkpoint import AnySize, write_miniature
from tests.conftest import SMALL, SMALL_V4
from tests.engines.conversion import (
    SMALL_AND_SENSITIVE,
    Tables,
    convert,
    uniform,
    write_recipe,
)
from tests.engines.decoded import write_decoded

Shards = tuple[Path, ...]

EVERYTHING = 512
"""More rows than a text here has."""

_STAYS = re.compile(r"hc_|ffn_gate_(inp|tid2eid)|_ape\.|engram_gate")
"""Matrices that are small and sensitive, or have one type only."""


@dataclass(frozen=True)
class Model:
    """A miniature, and which shards of its target hold which group."""

    name: str
    size: AnySize
    groups: Mapping[str, slice]

    @property
    def has_engram(self) -> bool:
        return "table" in self.groups


_EVERY_EXPERT = {"n_experts": 2, "n_experts_used": 2}

V41 = Model(
    "v4.1",
    replace(SMALL, engram_heads=1, **_EVERY_EXPERT),
    {"dense": slice(0, 3, 2), "table": slice(1, 2), "routed": slice(3, None)},
)
V4 = Model(
    "v4",
    replace(SMALL_V4, **_EVERY_EXPERT),
    {"dense": slice(0, 1), "routed": slice(1, None)},
)


class TypedModels:
    """One miniature in F32, in other types, and decoded from those again; each made once.

    It takes every expert and every compressed row: else a close choice that flips would hide what
    a type changes.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.packed = cache(self._packed)
        self.decoded = cache(self._decoded)

    @cached_property
    def source(self) -> Path:
        source = self.folder / "source"
        write_miniature(source, self.model.size, seed=1)
        path = source / "config.json"
        config = json.loads(path.read_text())
        config.get("text_config", config).update(
            index_topk=EVERYTHING, candidate_topk_blocks=EVERYTHING
        )
        path.write_text(json.dumps(config))
        return source

    @cached_property
    def exact(self) -> Shards:
        """All of it in F32."""
        return self._make("exact", self._in_one("F32"))

    def _packed(self, *types: str) -> Shards:
        """In one type, or in several that take turns, but for small sensitive matrices."""
        turns = zip(self._matrices, cycle(types)) if len(types) > 1 else ()
        return self._make("-".join(types), self._in_one(types[0]), dict(turns))

    def _decoded(self, *types: str) -> Shards:
        """The same decoded to F32."""
        folder = self.folder / f"decoded {' '.join(types)}"
        folder.mkdir()
        return tuple(write_decoded(shard, folder / shard.name) for shard in self.packed(*types))

    def sensitive_in(self, type_name: str) -> Shards:
        """In F32 but for routers and the mixing of residual streams."""
        tables = self._in_one("F32")
        sensitive = dict.fromkeys(SMALL_AND_SENSITIVE, type_name)
        changed = {**tables, "sub_roles": {**tables["sub_roles"], **sensitive}}
        return self._make(f"sensitive-{type_name}", changed)

    def _in_one(self, type_name: str) -> Tables:
        return uniform(type_name, has_engram=self.model.has_engram)

    @property
    def _matrices(self) -> Iterator[str]:
        """What takes any type."""
        for shard in self.exact:
            for tensor in read_gguf(shard).tensors.values():
                if len(tensor.ne) > 1 and not _STAYS.search(tensor.name):
                    yield tensor.name

    def _make(self, name: str, tables: Tables, tensors: Mapping[str, str] | None = None) -> Shards:
        recipe = write_recipe(self.folder / f"{name.lower()}.toml", tables, tensors)
        return convert(self.source, self.folder / "out", recipe).target

    def mixed(self, others: Shards, group: str) -> Shards:
        """The F32 model with one group from ``others``, under names that make them a set."""
        shards, place = list(self.exact), self.model.groups[group]
        shards[place] = others[place]
        names = [
            self.folder / shard_file_name("mixed", no, len(shards)) for no in range(len(shards))
        ]
        for shard, name in zip(shards, names, strict=True):
            name.unlink(missing_ok=True)
            os.link(shard, name)
        return tuple(names)
