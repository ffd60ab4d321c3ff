"""Drafts in other types than published: both families load them and speculate with them."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.gguf.reader import read_gguf
from tests.engines import install
from tests.engines.conftest import available
from tests.engines.conversion import convert, write_recipe
from tests.engines.decoded import write_decoded
from tests.engines.edited import Edited
from tests.engines.process import Process
from tests.engines.steady import steady
from tests.engines.test_types import PACKED

pytestmark = pytest.mark.engine

FREE = (
    *("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down"),
    *("attention", "draft_input", "markov", "confidence"),
)
"""Keys of the recipe's draft table that take any type."""

SENSITIVE = ("F16", "BF16", "Q8_0")
"""Types for router and stream mixing, one for each table."""

N_TABLES = len(SENSITIVE)
assert N_TABLES * len(FREE) >= len(PACKED)

ROUNDING = 0.4
"""How far the logits of the same numbers in F32 may be: 0.25 was measured, of others 1.7."""

ALWAYS = 70
N_GENERATED = 12
N_BLOCK = 5


def draft_table(no: int) -> dict[str, str]:
    """Every type serves in one of the tables at least."""
    types = islice(cycle(PACKED), no * len(FREE), None)
    sensitive = dict.fromkeys(("router", "hyper_connection"), SENSITIVE[no])
    return {"mode": "only", **dict(zip(FREE, types, strict=False)), **sensitive}


@dataclass(frozen=True)
class Family:
    """A small model: its target, another that is always sure, and drafts by each table."""

    target: Path
    sure: Path
    draft: Callable[[int], Path]


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Family]:
    @cache
    def of(name: str) -> Family:
        source = request.getfixturevalue(f"small_{name}miniature")
        folder = tmp_path_factory.mktemp(f"drafts {name}")

        @cache
        def draft(no: int) -> Path:
            recipe = write_recipe(folder / f"draft-{no}.toml", {"draft": draft_table(no)})
            return convert(source, folder / "out", recipe).draft

        target = convert(source, folder / "out", "v4-native" if name else "native").target
        sure = steady(Edited.read(target), ALWAYS).write(folder / "sure.gguf")
        return Family(target[0], sure, draft)

    return of


@pytest.mark.parametrize("no", range(N_TABLES))
@pytest.mark.parametrize(
    ("name", "engine"), [("", "mainline"), ("v4_", "mainline"), ("v4_", "native")]
)
def test_a_draft_of_many_types_guesses_what_must_come(
    request: pytest.FixtureRequest,
    family: Callable[[str], Family],
    name: str,
    engine: str,
    no: int,
) -> None:
    pair = family(name)
    asked = {type_name for key, type_name in draft_table(no).items() if key != "mode"}
    assert {t.type.name for t in read_gguf(pair.draft(no)).tensors.values()} >= asked
    with request.getfixturevalue(engine).load([pair.sure], draft=pair.draft(no)) as session:
        made = session.generate([ALWAYS], N_GENERATED)
    assert made.tokens == (ALWAYS,) * N_GENERATED
    assert made.n_accepted == made.n_drafted > N_GENERATED // 2


@pytest.mark.parametrize("no", range(N_TABLES))
def test_a_draft_says_what_its_own_numbers_say_in_f32(
    family: Callable[[str], Family], no: int, tmp_path: Path
) -> None:
    pair = family("v4_")
    other, packed = (pair.draft((no + step) % N_TABLES) for step in (1, 0))
    decoded = write_decoded(packed, tmp_path / "decoded.gguf")
    told, same, another = (first_guesses(pair.target, d) for d in (packed, decoded, other))
    assert np.abs(told - same).mean() < ROUNDING
    assert np.abs(told - another).mean() > 3 * ROUNDING


def first_guesses(target: Path, draft: Path) -> NDArray[np.float32]:
    """The draft's logits for the block after a text, ``[N_BLOCK, n_vocab]``."""
    script = Path(__file__).with_name("draft_child.py")
    command = (sys.executable, str(script), str(available(install.native_package)))
    process = Process(command, GGML_NO_BACKTRACE="1")
    try:
        said = process.ask(
            "block",
            target=str(target),
            draft=str(draft),
            tokens=np.random.default_rng(3).integers(0, 500, 40).tolist(),
            n_block=N_BLOCK,
        )
    finally:
        process.close()
    return np.frombuffer(base64.b64decode(said["logits"]), "<f4").reshape(N_BLOCK, -1)
