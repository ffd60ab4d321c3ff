"""V4 files against the model's own code in transformers, and the real table against its engine.

Every weight is F32 in these files, so that what is compared is names, shapes, numbers and metadata;
in other types engines round what they multiply with, and a random model's close choices flip.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.files import truncate, write_exact, writing
from pipeline.gguf.keys import f32, text, u32
from pipeline.miniature.hollow import write_headers_only
from pipeline.plan import Plan
from tasks.job import open_job
from tasks.request import JobParameters
from tests.engines import install
from tests.engines.conftest import available
from tests.engines.edited import Content, Edited
from tests.engines.engine import Engine
from tests.engines.native import Native
from tests.engines.process import Process, log_softmax
from tests.engines.transformers_v4 import Forward, forward
from tests.reference.v4_draft import V4Draft
from tests.reference.v4_weights import V4Weights
from tests.tasks.commands import luigi, run_recipe

pytestmark = pytest.mark.engine

N_TOKENS = 300
TOLERANCE = 3e-4
"""Of a logarithm; the largest logits are about 16, and float32 has seven digits."""

RECIPE = """
description = "Every weight as exact as it is stored, for comparison."
allow = ["larger_than_fp4"]

[roles]
routed = "F32"
attention = "F32"
embedding = "F32"
shared = "F32"

[draft]
routed = "F32"
attention = "F32"
shared = "F32"
router = "F32"
draft_input = "F32"
markov = "F32"
confidence = "F32"
"""

MATRICES = {
    "lm_head.weight": "head.weight",
    "model.layers.0.mlp.gate.tid2eid": "layers.0.ffn.gate.tid2eid",
    "model.layers.3.self_attn.q_a_proj.weight": "layers.3.attn.wq_a.weight",
    "model.layers.3.self_attn.compressor.position_bias": "layers.3.attn.compressor.ape",
    "model.layers.2.self_attn.compressor.indexer.kv_proj.weight": (
        "layers.2.attn.indexer.compressor.wkv.weight"
    ),
    "model.layers.6.mlp.shared_experts.down_proj.weight": "layers.6.ffn.shared_experts.w2.weight",
}
"""Name in transformers -> name in the checkpoint: every stored form but FP4 is among them."""

GATES_AND_UPS = "model.layers.4.mlp.experts.gate_up_proj"

DRAFT_LAYERS = (5, 6, 7)
"""config.json says 4, 5 and 6 and means outputs; an engine takes the inputs of the next ones."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, what the recipe made of it, a text, and what transformers says to that."""

    weights: V4Weights
    target: tuple[Path, ...]
    draft: Path
    tokens: list[int]
    truth: Forward

    @property
    def logprobs(self) -> NDArray[np.float64]:
        return log_softmax(self.truth.logits.astype(np.float64))

    def apart(self, logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest difference at each position."""
        return np.abs(logprobs - self.logprobs).max(axis=1)


def case_of(source: Path, cwd: Path, parameters: Sequence[str] = ()) -> Case:
    weights = V4Weights(source)
    tokens = np.random.default_rng(3).integers(0, weights.config["vocab_size"], N_TOKENS).tolist()
    truth = forward(source, tokens, available(install.transformers_packages), parameters)
    (cwd / "exact.toml").write_text(RECIPE)
    done = luigi(*run_recipe(source, "exact.toml"), cwd=cwd)
    assert done.returncode == 0, done.stderr
    (folder,) = (cwd / "out").glob("mini-exact*")
    (draft,) = folder.glob("*-draft-*.gguf")
    target = sorted({*folder.glob("*.gguf")} - {draft})
    return Case(weights, tuple(target), draft, tokens, truth)


@pytest.fixture(scope="module")
def exact(v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    cwd = tmp_path_factory.mktemp("exact")
    return case_of(v4_miniature, cwd, [*MATRICES, GATES_AND_UPS])


@pytest.fixture(scope="module")
def small(small_v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(small_v4_miniature, tmp_path_factory.mktemp("small exact"))


@pytest.fixture(params=["mainline", "native"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def test_the_text_reaches_every_rule(exact: Case) -> None:
    """It fills the window, two blocks of 128, and many more blocks of 4 than the index picks."""
    config = exact.weights.config
    assert config["sliding_window"] < 128 < N_TOKENS // 2
    assert config["index_topk"] < N_TOKENS // 4 // 2


def test_transformers_reads_the_weights_as_the_formats_say(exact: Case) -> None:
    read, weights = exact.truth.parameters, exact.weights
    for name, released in MATRICES.items():
        assert np.array_equal(read[name], weights[released]), name
    for expert, both in enumerate(read[GATES_AND_UPS]):
        prefix = f"layers.4.ffn.experts.{expert}."
        wanted = [weights[f"{prefix}{part}.weight"] for part in ("w1", "w3")]
        assert np.array_equal(both, np.concatenate(wanted)), expert


def test_every_position_is_what_transformers_says(engine: Engine, exact: Case) -> None:
    with engine.load(exact.target) as session:
        logprobs = session.logprobs(exact.tokens)
    worst = exact.apart(logprobs)
    assert np.mean(worst < TOLERANCE) >= 0.99, np.sort(worst)[-8:]
    assert np.abs(logprobs - exact.logprobs).mean() < 1e-5
    assert np.array_equal(logprobs.argmax(axis=1), exact.logprobs.argmax(axis=1))


def shifted_hashes(model: Edited) -> Edited:
    """Every token's experts in hash layer 1 exchanged for its neighbour's."""
    name = "blk.1.ffn_gate_tid2eid.weight"
    old = model.tensors[name]
    ids = np.frombuffer(old.data, "<i4").reshape(old.ne[::-1])
    return model.tensor(name, Content(old.ne, old.type_name, np.roll(ids, 1, axis=0).tobytes()))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda m: m.key(u32("deepseek4.attention.sliding_window", 65)), id="window"),
        pytest.param(lambda m: m.key(u32("deepseek4.attention.indexer.top_k", 15)), id="top-k"),
        pytest.param(lambda m: m.key(f32("deepseek4.rope.scaling.factor", 8.0)), id="yarn"),
        pytest.param(lambda m: m.key(text("deepseek4.rope.scaling.type", "none")), id="no yarn"),
        pytest.param(
            lambda m: m.values("deepseek4.swiglu_clamp_shexp", lambda limits: [10.0] * len(limits)),
            id="clamp of the shared expert",
        ),
        pytest.param(lambda m: m.key(f32("deepseek4.expert_weights_scale", 1.0)), id="scale"),
        pytest.param(shifted_hashes, id="hash table"),
    ],
)
def test_what_loads_but_is_wrong_shows(
    wrong: Callable[[Edited], Edited], native: Native, small: Case, tmp_path: Path
) -> None:
    file = wrong(Edited.read(small.target)).write(tmp_path / "wrong.gguf")
    with native.load([file]) as session:
        worst = small.apart(session.logprobs(small.tokens))
    assert worst.max() > 100 * TOLERANCE
    assert np.mean(worst < TOLERANCE) < 0.9


def test_a_draft_says_what_the_reference_says(exact: Case) -> None:
    config, tokens = exact.weights.config, exact.tokens
    n, n_block = 150, config["dspark_block_size"]
    script = Path(__file__).with_name("draft_child.py")
    command = (sys.executable, str(script), str(available(install.native_package)))
    process = Process(command, GGML_NO_BACKTRACE="1")
    try:
        target, draft = str(exact.target[0]), str(exact.draft)
        said = process.ask(
            "block", target=target, draft=draft, tokens=tokens[: n + 1], n_block=n_block
        )
    finally:
        process.close()

    assert tuple(said["layers"]) == DRAFT_LAYERS
    features = [exact.truth.outputs[layer][:n] for layer in config["dspark_target_layer_ids"]]
    for inputs, outputs in zip(said["inputs"], features, strict=True):
        assert np.abs(floats(inputs, n) - outputs).max() < 1e-5 * np.abs(outputs).max()
    side_by_side = np.concatenate(features, axis=1).astype(np.float64)
    wanted = V4Draft(exact.weights).propose(side_by_side, tokens[n])
    assert np.abs(floats(said["logits"], n_block) - wanted.logits).max() < TOLERANCE
    assert np.abs(floats(said["confidence"], n_block)[:, 0] - wanted.confidence).max() < 1e-5
    assert wanted.confidence.min() < 0.5 < wanted.confidence.max()


def floats(sent: str, n_rows: int) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(sent), "<f4").reshape(n_rows, -1)


def test_a_draft_changes_no_token(engine: Engine, exact: Case) -> None:
    with engine.load(exact.target) as session:
        prompt = session.tokenize("<｜User｜>bacoti fagu 12, <｜Assistant｜></think>")
        alone = session.generate(prompt, 20)
    with engine.load(exact.target, draft=exact.draft) as session:
        beside = session.generate(prompt, 20)
    assert beside.tokens == alone.tokens
    assert len(set(alone.tokens)) > 1
    assert beside.n_drafted > 0


def test_the_real_table_is_what_the_engine_asks_for(native: Native, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_headers_only(source, like="v4-flash-0731", tokenizer=None)
    job = open_job(JobParameters(source=str(source), recipe="v4-native", out=str(out)))
    target, draft = job.plans
    with native.load_headers(sparse(target, out)) as session:
        assert (session.n_params, session.nbytes) == (284_334_567_511, 156_373_008_732)
    assert len(target.tensors) == 1328
    with native.load_headers(sparse(draft, out)) as session:
        assert (session.n_params, session.nbytes) == (19_845_850_983, 10_890_804_124)
    assert len(draft.tensors) == 81


def sparse(plan: Plan, folder: Path) -> list[Path]:
    """The plan's files: headers over holes of the full size."""
    folder.mkdir(exist_ok=True)
    files = []
    for shard in plan.shards:
        file = folder / shard.file_name
        with writing(file, create=True) as fd:
            write_exact(fd, memoryview(shard.header), 0, file)
            truncate(file, shard.nbytes)
        assert file.stat().st_blocks * 512 < 50e6
        files.append(file)
    return files
