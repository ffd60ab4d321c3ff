"""Observing a small checkpoint without luigi, and the reference, which has all of it in memory."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from pipeline.experts.saliency import Sum
from pipeline.forward import head
from pipeline.miniature.checkpoint import write_miniature
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.observe.arithmetic import Arithmetic, Precision
from pipeline.observe.disk_state import DiskState
from pipeline.observe.memory_state import MemoryState
from pipeline.observe.plan import Keeping, Room, plan_observation
from pipeline.observe.records import Records
from pipeline.observe.run import observe
from pipeline.observe.sequences import Sequences
from pipeline.observe.state import file_names
from pipeline.observe.text import Text
from pipeline.observe.topology import Slot
from pipeline.observe.weights import WeightLoader
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.reader import SourceReader
from tests.reference.trunk import Trunk
from tests.reference.weights import from_checkpoint

ROOMY = Room(host=10**10, device=None, disk=10**10)
SPEC = "a spec"

TIGHT = {
    "sliding_window": 8,
    "index_topk": 4,
    "candidate_block_size": 3,
    "candidate_topk_blocks": 3,
    "swiglu_limit": 0.4,
}
"""Limits so low that all of them bind within a few dozen tokens."""


def write_tight(folder: Path, size, seed: int) -> Path:
    """A miniature with these limits in its config.json."""
    write_miniature(folder, size, seed=seed)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["text_config"] |= TIGHT
    path.write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Model:
    """A checkpoint and what is made of it."""

    folder: Path

    @cached_property
    def checkpoint(self):
        return open_checkpoint(self.folder)

    @cached_property
    def config(self):
        return read_config(self.checkpoint.config)

    @cached_property
    def specs(self):
        return {spec.name: spec for spec in expected_tensors(self.config)}

    @cached_property
    def token_map(self):
        content = (self.folder / "tokenizer.json").read_bytes()
        return compress_vocabulary(content, self.config.vocab_size)

    def text(self, tokens, config=None) -> Text:
        return Text(Sequences(tuple(tokens), len(tokens)), self.token_map, config or self.config)

    @contextmanager
    def loader(self, arithmetic, config=None):
        with SourceReader(self.checkpoint) as reader:
            yield WeightLoader(
                self.checkpoint, reader, config or self.config, self.specs, arithmetic
            )


def some_tokens(model: Model, lengths, seed=7):
    random = np.random.default_rng(seed)
    return [random.integers(3, model.config.vocab_size - 20, n) for n in lengths]


def arithmetic_of(precision="float64", device="cpu", **changes):
    return replace(Arithmetic.of(device, Precision(precision)), **changes)


@dataclass(frozen=True)
class Observed:
    """Sums ``[2, 4, n_layers, n_experts]`` (half, sum) and logits of every sequence."""

    sums: np.ndarray
    logits: list[np.ndarray]


def observed(
    model: Model,
    tokens,
    arithmetic=None,
    *,
    config=None,
    folder=None,
    room=ROOMY,
    records=None,
    done=(),
    **changes,
) -> Observed:
    """An observation; ``changes`` are to the plan, ``folder`` keeps the state on disk."""
    arithmetic = arithmetic or arithmetic_of()
    config = config or model.config
    text = model.text(tokens, config)
    keeping = Keeping.DISK if folder else Keeping.MEMORY
    plan = plan_observation(config, model.specs, text.sequences.lengths, arithmetic, keeping, room)
    plan = replace(plan, **changes)
    state = MemoryState(arithmetic.device)
    if folder:
        state = disk_state(folder, text, arithmetic, done)
    with model.loader(arithmetic, config) as loader:
        halves = observe(text, loader, plan, arithmetic, state, records=records, done=done)
        return Observed(sums_of(halves), logits_of(text, state, loader))


def disk_state(folder, text, arithmetic, done=()):
    n_done, lengths = len(done), text.sequences.lengths
    needed = file_names(text.config, n_done - 1) if n_done else ()
    found = {n: d for record in done for n, d in record.state.items() if n in needed}
    return DiskState(folder, text.config, lengths, arithmetic.values, n_done=n_done, found=found)


def one_life(source, folder, lengths, death=None):
    """Observe with the state on disk, as far as this process comes; gives the sums."""
    torch.set_num_threads(1)
    model = Model(Path(source))
    tokens, config = some_tokens(model, lengths), model.config
    model.specs, model.token_map  # noqa: B018 - made before calls are counted
    if death:
        death.install()
    records = Records(Path(folder), SPEC)
    done = records.load(config.n_layers)
    found = observed(
        model, tokens, arithmetic_of("float32"), folder=Path(folder), records=records, done=done
    )
    return found.sums


def sums_of(halves):
    return np.array(
        [[[layer[half].sums[name] for layer in halves] for name in Sum] for half in range(2)]
    )


@torch.inference_mode()
def logits_of(text, state, loader):
    norm, matrix = loader.tensor("norm.weight"), loader.tensor("head.weight")
    last = (
        head.last(
            state.read(Slot.STREAMS, n).to(norm.device),
            state.read(Slot.PRE, n).to(norm.device),
            norm,
            text.config,
        )
        for n in range(len(text.sequences.tokens))
    )
    return [(one.to(matrix.dtype) @ matrix.mT).double().cpu().numpy() for one in last]


def expected(model: Model, tokens) -> Observed:
    """What the numpy reference makes of the same, in float64."""
    config, weights = model.config, from_checkpoint(model.folder)
    sums = np.zeros((2, 4, config.n_layers, config.n_experts))
    logits = []
    for number, one in enumerate(tokens):

        def observe_expert(layer, expert, positions, gates, outputs, half=number % 2):
            norms = np.linalg.norm(outputs, axis=-1)
            own = [len(positions), gates.sum(), norms.sum(), (gates * norms).sum()]
            sums[half, :, layer, expert] += own

        logits.append(Trunk(weights, observer=observe_expert).logits(one.tolist()))
    return Observed(sums, logits)


def relative(found, wanted):
    """The largest difference as a share of the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def assert_sums(found: Observed, wanted: Observed, rtol: float) -> None:
    assert next(iter(Sum)) is Sum.COUNTS
    np.testing.assert_array_equal(found.sums[:, 0], wanted.sums[:, 0])
    np.testing.assert_allclose(found.sums, wanted.sums, rtol=rtol)


def assert_logits(found: Observed, wanted: Observed, rtol: float) -> None:
    for one, other in zip(found.logits, wanted.logits, strict=True):
        assert relative(one, other) < rtol
