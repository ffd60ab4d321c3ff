"""The observation itself: every layer once, over all sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeline.forward import rope
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.attention_pass import LayerRun, attend
from pipeline.observe.chunk import Chunk
from pipeline.observe.expert_pass import use_experts
from pipeline.observe.plan import ObservationPlan
from pipeline.observe.records import Halves, LayerRecord, Records
from pipeline.observe.state import State
from pipeline.observe.text import Text
from pipeline.observe.weights import ExpertStream, WeightLoader


@dataclass(frozen=True, slots=True)
class ObserveEvents:
    """What an observation tells while it runs."""

    expert_done: Callable[[int, int], None] = lambda _layer, _expert: None
    """One chunk's tokens of an expert are through it."""
    layer_done: Callable[[int, float], None] = lambda _layer, _seconds: None
    """A layer is done and on record, after so many seconds."""


@torch.inference_mode()
def observe(
    text: Text,
    loader: WeightLoader,
    plan: ObservationPlan,
    arithmetic: Arithmetic,
    state: State,
    *,
    records: Records | None = None,
    done: Sequence[LayerRecord] = (),
    events: ObserveEvents | None = None,
) -> list[Halves]:
    """The sums of every layer, of even and of odd sequences; ``state`` is then that of the end.

    Args:
        text: What is read.
        loader: The model's weights.
        plan: How.
        arithmetic: Types and device.
        state: What is carried on; as the layers that are ``done`` left it.
        records: Where finished layers are noted; None where they need not be.
        done: What is known of the first layers.
        events: Told how it goes.

    Raises:
        SourceError: The checkpoint cannot be read or changed meanwhile.
        OutputError: The disk refused, or the state on it is not what was written.
    """
    config, events = text.config, events or ObserveEvents()
    stream = ExpertStream(loader, config, n_ahead=plan.n_ahead)
    halves = [record.halves for record in done]
    state.tidy()
    for layer in range(len(done), config.n_layers):
        begin = time.monotonic()
        state.begin()
        run = LayerRun(
            layer=layer,
            config=config,
            arithmetic=arithmetic,
            weights=loader.layer(layer),
            loader=loader,
            text=text,
            state=state,
            rates=rope.frequencies(config, config.layer_ratios[layer]).to(arithmetic.device),
            block=plan.block,
        )
        halves.append(_all_chunks(run, plan, stream, events))
        left = state.finish()
        if records is not None:
            records.save(layer, LayerRecord(halves[-1], left))
        state.tidy()
        events.layer_done(layer, time.monotonic() - begin)
    return halves


def _all_chunks(
    run: LayerRun, plan: ObservationPlan, stream: ExpertStream, events: ObserveEvents
) -> Halves:
    sums: Halves | None = None
    for numbers in plan.chunks:
        chunk = Chunk(numbers, run.text.sequences.lengths, run.config, run.arithmetic)
        for sequence in numbers:
            attend(run, sequence, chunk)
        own = use_experts(run, chunk, stream, lambda expert: events.expert_done(run.layer, expert))
        sums = own if sums is None else (sums[0] + own[0], sums[1] + own[1])
    assert sums is not None
    return sums
