"""Models with fewer experts: a whole cut loads and drafts, and every half cut is refused.

The words are those of mainline llama.cpp b12211.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline.experts.keep_json import write_keep
from pipeline.gguf.keys import u32
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.form import V41_MAINLINE
from tests.conftest import SMALL
from tests.engines.conversion import Conversion, convert
from tests.engines.edited import Edited
from tests.engines.engine import Refused
from tests.engines.mainline import Mainline
from tests.engines.shipped import keep_list

pytestmark = pytest.mark.engine

N_KEPT = 3
LAYER = 4
"""A layer in the middle, for what is wrong in one only."""

COUNT = "deepseek41.expert_count"


@dataclass(frozen=True)
class Pair:
    """A model and what is left of it."""

    whole: Edited
    cut: Edited
    files: Conversion


@pytest.fixture(scope="module")
def pair(small_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pruned")
    keep = folder / "keep.json"
    write_keep(keep, keep_list(SMALL, N_KEPT))
    whole = convert(small_miniature, folder / "whole", "native")
    cut = convert(small_miniature, folder / "cut", "native", keep=str(keep))
    return Pair(Edited.read(whole.target), Edited.read(cut.target), cut)


def test_what_is_left_loads_and_drafts(mainline: Mainline, pair: Pair) -> None:
    with mainline.load(pair.files.target, draft=pair.files.draft) as session:
        tokens = session.tokenize("Three are left of four.")
        logprobs = session.logprobs(tokens)
        drafted = session.generate(tokens, 6)
    with mainline.load(pair.files.target) as session:
        assert session.generate(tokens, 6).tokens == drafted.tokens
    assert drafted.n_drafted >= 6
    assert np.isfinite(logprobs).all()
    assert pair.cut.keys[COUNT].value == N_KEPT


def count(n: int) -> Callable[[Pair], Edited]:
    return lambda pair: pair.cut.key(u32(COUNT, n))


def uncut(part: str) -> Callable[[Pair], Edited]:
    """An edit that leaves a part of one layer as it was."""
    name = f"blk.{LAYER}.{part}"
    return lambda pair: pair.cut.tensor(name, pair.whole.tensors[name])


@pytest.mark.parametrize(
    ("edit", "tensor"),
    [
        pytest.param(count(4), "blk.0.ffn_gate_inp.weight", id="the count of the whole model"),
        pytest.param(count(2), "blk.0.ffn_gate_inp.weight", id="a count below the stacks"),
        pytest.param(uncut("ffn_gate_inp.weight"), f"blk.{LAYER}.ffn_gate_inp.weight", id="router"),
        pytest.param(uncut("exp_probs_b.bias"), f"blk.{LAYER}.exp_probs_b.bias", id="bias"),
        pytest.param(
            uncut("exp_probs_b_vl.bias"), f"blk.{LAYER}.exp_probs_b_vl.bias", id="bias of images"
        ),
        pytest.param(uncut("ffn_up_exps.weight"), f"blk.{LAYER}.ffn_up_exps.weight", id="a stack"),
    ],
)
def test_half_a_cut_is_refused_by_the_engine_and_by_us(
    mainline: Mainline, pair: Pair, edit: Callable[[Pair], Edited], tensor: str, tmp_path: Path
) -> None:
    path = edit(pair).write(tmp_path / "half.gguf")
    with pytest.raises(Refused, match=rf"tensor '{re.escape(tensor)}' has wrong shape"):
        mainline.load([path])
    problems = check_contract(read_model(path), V41_MAINLINE)
    assert tensor in {problem.tensor for problem in problems}
    assert all("another shape" in problem.what for problem in problems)
