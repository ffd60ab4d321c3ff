"""Every type that this project writes, in real engines: read as it was meant, and how close it is.

Two measures, both a mean distance of log-probabilities:

- to the same file with these tensors decoded by us to F32. What is left is what the engine rounds
  its activations to; a type that it reads otherwise than we mean it gives what has nothing to do
  with the right answer, 2.3 and more away. Rows that are looked up are multiplied with nothing:
  there the distance must be zero.
- to the file that is F32 throughout: what the type itself loses. Random weights lose far more by it
  than trained ones, so this tells classes of types apart and says nothing about a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.gguf.keys import text
from pipeline.gguf.reader import read_gguf
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES
from pipeline.recipe.values import MAINLINE_TYPES
from tests.engines.edited import Content, Edited
from tests.engines.engine import Engine, Refused
from tests.engines.typed_models import V4, V41, Shards, TypedModels

pytestmark = pytest.mark.engine

WRITTEN = [name for name in MAINLINE_TYPES if name not in NEEDS_IMPORTANCE]
PACKED = [name for name in WRITTEN if name != "F32"]


def bits_of(type_name: str) -> int:
    """The bits that a type is named after."""
    (bits,) = re.findall(r"\d+", type_name.split("_")[0])
    return int(bits)


ONE_BY_ONE = [(name,) for name in PACKED]
BY_BITS = [tuple(same) for _, same in groupby(sorted(PACKED, key=bits_of), bits_of)]

CASES = [
    pytest.param(model, engine, group, types, id=f"{model}-{engine}-{group}-{'-'.join(types)}")
    for model, engine, groups, choices in (
        ("v4.1", "mainline", ("routed", "table", "dense"), ONE_BY_ONE),
        ("v4", "native", ("routed", "dense"), BY_BITS),
        ("v4", "mainline", ("routed", "dense"), BY_BITS),
    )
    for group in groups
    for types in choices
]
N_TOKENS = {"mainline": 24, "native": 140}
"""As many as the engine answers for in a blink; the native one for a whole block of 128."""

ROUNDING = {"routed": 0.3, "dense": 0.7, "table": 0.0}
"""How far the same numbers in F32 may be; 0.16, 0.39 and 0 were measured."""


@dataclass(frozen=True)
class Losses:
    """How far from F32 each group may be; no bound where a random model's answer is lost."""

    routed: float = np.inf
    dense: float = np.inf
    table: float = np.inf


LOSSES = {
    16: Losses(routed=0.05, dense=0.07, table=1e-6),
    8: Losses(routed=0.15, dense=0.8, table=0.002),
    6: Losses(routed=0.3, dense=1.2, table=0.006),
    5: Losses(routed=0.8, table=0.02),
    4: Losses(routed=1.2, table=0.035),
    3: Losses(table=0.07),
    2: Losses(table=0.2),
    1: Losses(table=0.2),
}
"""By the bits that a type is named after; up to twice what was measured, since other processors add
up in another order."""

EXACT_EXPERTS = "MXFP4"
"""The type that holds the checkpoint's own numbers: only activations are rounded, to 8 bits."""


def allowed_loss(types: tuple[str, ...], group: str) -> float:
    is_exact = (types, group) == ((EXACT_EXPERTS,), "routed")
    return getattr(LOSSES[8 if is_exact else bits_of(types[0])], group)


@dataclass(frozen=True)
class Asked:
    """An engine that is asked what comes after each token of one text."""

    engine: Engine
    n_tokens: int
    models: TypedModels

    def answer(self, shards: Shards) -> NDArray[np.float64]:
        with self.engine.load(shards) as session:
            tokens = np.random.default_rng(3).integers(0, session.n_vocab, self.n_tokens)
            logprobs = session.logprobs(tokens.tolist())
        assert np.isfinite(logprobs).all()
        assert np.abs(np.exp(logprobs).sum(axis=1) - 1).max() < 1e-12
        return logprobs

    @cached_property
    def exact(self) -> NDArray[np.float64]:
        return self.answer(self.models.exact)


@pytest.fixture(scope="module")
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Asked]:
    @cache
    def models(name: str) -> TypedModels:
        model = {"v4": V4, "v4.1": V41}[name]
        return TypedModels(model, tmp_path_factory.mktemp(f"types of {name}"))

    @cache
    def asking(model: str, engine: str) -> Asked:
        return Asked(request.getfixturevalue(engine), N_TOKENS[engine], models(model))

    return asking


def distance(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.abs(one - other).mean())


def types_in(shards: Shards) -> set[str]:
    return {t.type.name for shard in shards for t in read_gguf(shard).tensors.values()}


@pytest.mark.parametrize(("model", "engine", "group", "types"), CASES)
def test_types_are_read_as_they_were_meant(
    asked: Callable[[str, str], Asked], model: str, engine: str, group: str, types: tuple[str, ...]
) -> None:
    at = asked(model, engine)
    packed, decoded = at.models.packed(*types), at.models.decoded(*types)
    assert types_in(packed[at.models.model.groups[group]]) >= set(types)
    answer = at.answer(at.models.mixed(packed, group))
    assert distance(answer, at.answer(at.models.mixed(decoded, group))) <= ROUNDING[group]
    assert distance(answer, at.exact) <= allowed_loss(types, group)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize(("model", "engine"), [("v4.1", "mainline"), ("v4", "native")])
def test_routers_and_stream_mixing_may_be_less_than_f32(
    asked: Callable[[str, str], Asked], model: str, engine: str, type_name: str
) -> None:
    at = asked(model, engine)
    shards = at.models.sensitive_in(type_name)
    assert type_name in types_in(shards)
    assert distance(at.answer(shards), at.exact) <= allowed_loss((type_name,), "routed")


@pytest.mark.parametrize("engine", ["mainline", "native"])
def test_types_of_another_engine_are_refused(
    request: pytest.FixtureRequest, engine: str, tmp_path: Path
) -> None:
    """Those of ik_llama.cpp, and in the older build the one that has come since."""
    reader, path = request.getfixturevalue(engine), tmp_path / "other.gguf"
    others = [t for t in TYPES.values() if t.family == "ik"]
    if engine == "native":
        others.append(TYPES["F8_E4M3"])
    for other in others:
        content = Content((256,), other.name, bytes(other.row_nbytes(256)))
        Edited({"": text("general.architecture", "llama")}, {"one": content}).write(path)
        with pytest.raises(Refused, match=rf"invalid ggml type {other.type_id}\. should be in"):
            reader.load([path])
