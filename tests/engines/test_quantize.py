"""Byte for byte what the engines' own quantizing writes: every type, with and without importance.

A V4 miniature in F32, whose numbers are those of its FP4, FP8 and BF16 weights, is quantized by
llama.cpp, by our quantizer, and by a whole run that reads the same GGUF. ik_llama.cpp's tool, whose
pinned build knows no DeepSeek V4, is given drawn numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import GgmlType
from tests.engines import install, plain_model
from tests.engines.conftest import available
from tests.engines.conversion import convert, uniform, write_recipe
from tests.engines.quantize import Importance, Source, by_ik, by_llama, matrices_of
from tests.engines.typed_models import V4, TypedModels
from tests.pipeline.importance.writing import gguf_bytes

pytestmark = pytest.mark.engine

MAINLINE = sorted(GgmlQuantizer.written)
IK = sorted(IkQuantizer.written)

NEARLY = {"IQ1_M": 1e-3}
"""Types whose search compares sums that compilers round each in their way; 4e-6 was measured."""

WEIGHTED = pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])


def usable(names: list[str], *, is_weighted: bool) -> list[str]:
    return [name for name in names if is_weighted or name not in NEEDS_IMPORTANCE]


def share_of_other_bytes(found: bytes, wanted: bytes) -> float:
    assert len(found) == len(wanted)
    return float(np.mean(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)))


def assert_same(
    found: Mapping[str, tuple[str, bytes]],
    wanted: Mapping[str, bytes],
    types: Mapping[str, GgmlType],
) -> None:
    assert {name: kind for name, (kind, _) in found.items()} == {
        n: t.name for n, t in types.items()
    }
    others = {
        (name, kind): share
        for name, (kind, content) in found.items()
        if (share := share_of_other_bytes(content, wanted[name])) > NEARLY.get(kind, 0)
    }
    assert others == {}


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source.read(TypedModels(V4, tmp_path_factory.mktemp("quantized V4")).exact)


@WEIGHTED
def test_mainline_types_are_those_of_llama_cpp(
    v4: Source, tmp_path: Path, is_weighted: bool
) -> None:
    libraries = available(install.quantizing_libraries)
    names = usable(MAINLINE, is_weighted=is_weighted)
    types, importance = v4.dealt(names), v4.importance() if is_weighted else None
    assert {kind.name for kind in types.values()} == set(names)
    theirs = by_llama(libraries, v4, tmp_path / "theirs.gguf", types, importance)
    assert_same(theirs, v4.encoded(GgmlQuantizer(), types, importance), types)
    ours = by_run(v4, tmp_path, types, importance)
    assert_same(theirs, {name: content for name, (_, content) in ours.items()}, types)


def by_run(
    source: Source, folder: Path, types: Mapping[str, GgmlType], importance: Importance | None
) -> dict[str, tuple[str, bytes]]:
    """The same by RunRecipe, from the GGUF."""
    tensors = {name: kind.name for name, kind in types.items()}
    recipe = write_recipe(folder / "dealt.toml", uniform("F32", has_engram=False), tensors)
    more = {}
    if importance is not None:
        entries = {name: (w, np.ones(len(w), np.float32)) for name, w in importance.items()}
        (folder / "imatrix.gguf").write_bytes(gguf_bytes(entries))
        recipe.write_text(f"{recipe.read_text()}\n[imatrix]\nprior = 0.0\n")
        more = {"imatrix": str(folder / "imatrix.gguf")}
    made = convert(source.files[0], folder / "out", recipe, **more).target
    return {name: found for path in made for name, found in matrices_of(path, source).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("quantized plain") / "plain.gguf"
    with mock.patch.multiple(plain_model, WIDTH=256, FF=512):
        plain_model.write(path)
    return Source.read([path])


@WEIGHTED
def test_ik_types_are_those_of_ik_llama_cpp(
    plain: Source, tmp_path: Path, is_weighted: bool
) -> None:
    types, importance = plain.dealt(IK), plain.importance() if is_weighted else None
    assert {kind.name for kind in types.values()} == set(IK)
    theirs = by_ik(plain, tmp_path / "theirs.gguf", types, importance)
    assert_same(theirs, plain.encoded(IkQuantizer(), types, importance), types)
