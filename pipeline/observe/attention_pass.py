"""The first half of a layer for one sequence: engram, attention, and the route to the experts.

Token rows and compressed rows need the whole sequence, everything else is done block by block. A
token attends to at most window + top-k rows however long the text is; they are gathered for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.forward import attention, compression, engram, hyper_connection, indexer, moe, rope
from pipeline.forward.linear import rms
from pipeline.model.config import ModelConfig
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.chunk import Chunk, blocks
from pipeline.observe.state import State
from pipeline.observe.text import Text
from pipeline.observe.topology import Slot
from pipeline.observe.weights import LayerWeights, WeightLoader


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer while all sequences go through it; ``block`` tokens are worked on at a time."""

    layer: int
    config: ModelConfig
    arithmetic: Arithmetic
    weights: LayerWeights
    loader: WeightLoader
    text: Text
    state: State
    rates: Tensor
    block: int

    @property
    def ratio(self) -> int:
        """Tokens per compressed row, 0 where there is none."""
        return self.config.layer_ratios[self.layer]

    @property
    def picks_among(self) -> bool:
        """Whether the layer's indexer chooses among candidates that an earlier one left."""
        candidate = self.config.candidate
        return candidate is not None and self.layer > candidate.source_layer

    def read(self, slot: Slot, sequence: int) -> Tensor:
        """What is carried on, on the device."""
        return self.state.read(slot, sequence).to(self.arithmetic.device)

    def carried(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Streams and first mix; before the first layer, what the embedding gives."""
        if self.layer:
            return self.read(Slot.STREAMS, sequence), self.read(Slot.PRE, sequence)
        embedded = self.loader.rows("embed.weight", self.text.tokens(sequence))
        return hyper_connection.start(embedded, self.config.hc_mult)

    def turns(self, positions: Tensor) -> rope.Turns:
        """The turns of ``positions`` in this layer."""
        return rope.turns(positions, self.rates, self.arithmetic.values)


@dataclass(slots=True)
class _Rows:
    """The rows of a sequence: those of its tokens, then compressed ones, all rotated."""

    all: Tensor
    n_tokens: int
    keys: Tensor | None


def attend(run: LayerRun, sequence: int, out: Chunk) -> None:
    """Take the sequence of that number up to its experts; ``out`` gets what they need."""
    streams, pre = run.carried(sequence)
    x = _normed_inputs(run, sequence, streams, pre)
    rows = _rows(run, sequence, x)
    picks = _Picks(run, sequence)
    for tokens in blocks(len(x), run.block):
        positions = torch.arange(tokens.start, tokens.stop, device=x.device)
        by = run.turns(positions)
        low = attention.low_rank(x[tokens], run.weights.attention, run.config)
        picked = picks.of(tokens, x[tokens], low, by, rows)
        gathered = _gathered(run, positions, low, by, rows, picked)
        y = attention.project(gathered, run.weights.attention, run.config)
        mix = hyper_connection.mixes(streams[tokens], run.weights.attention_mix, run.config)
        streams[tokens] = hyper_connection.expand(y, streams[tokens], mix.post, mix.comb)
        _route(run, sequence, tokens, streams[tokens], mix.pre, out)
    picks.keep()
    run.state.hold(sequence, streams)


def _normed_inputs(run: LayerRun, sequence: int, streams: Tensor, pre: Tensor) -> Tensor:
    """Inputs of the attention, ``[T, D]``; the engram writes into ``streams`` first."""
    weights, memories = run.weights, run.text.engram_rows(run.layer, sequence)
    x = torch.empty_like(streams[:, 0])
    for tokens in blocks(len(x), run.block):
        if weights.engram is not None and memories is not None:
            name = f"layers.{run.layer}.engram.embed.weight"
            recalled = run.loader.rows(name, memories[tokens].ravel())
            recalled = recalled.view(tokens.stop - tokens.start, -1)
            streams[tokens] = engram.written(streams[tokens], recalled, weights.engram, run.config)
        collapsed = hyper_connection.collapse(streams[tokens], pre[tokens])
        x[tokens] = rms(collapsed, run.config.rms_eps, weights.attention_norm)
    return x


def _rows(run: LayerRun, sequence: int, x: Tensor) -> _Rows:
    weights, config = run.weights, run.config
    by = run.turns(torch.arange(len(x), device=x.device))
    own = rope.rotate(attention.token_rows(x, weights.attention, config), by)
    if not run.ratio:
        return _Rows(own, len(x), None)
    if weights.compressor is None:
        keys = run.read(Slot.KEYS, sequence) if weights.indexer else None
        return _Rows(torch.cat([own, run.read(Slot.ROWS, sequence)]), len(x), keys)
    assert weights.keys is not None
    latents = compression.latents(x, run.ratio, weights.compressor, config)
    by = run.turns(compression.group_positions(len(latents), run.ratio, x.device))
    rows = rope.rotate(latents, by)
    # Keys come from the latents before those are rotated.
    keys = indexer.keys(latents, by, weights.keys, config)
    run.state.write(Slot.ROWS, sequence, rows)
    run.state.write(Slot.KEYS, sequence, keys)
    return _Rows(torch.cat([own, rows]), len(x), keys)


def _gathered(
    run: LayerRun,
    positions: Tensor,
    low: Tensor,
    by: rope.Turns,
    rows: _Rows,
    picked: Tensor | None,
) -> Tensor:
    """What the heads gather from window and picked rows, rotated back, ``[n, H, d]``."""
    weights, config = run.weights.attention, run.config
    numbers = attention.window(positions, min(config.sliding_window, rows.n_tokens))
    if picked is not None:
        compressed = torch.where(picked < 0, -1, picked + rows.n_tokens)
        numbers = torch.cat([numbers, compressed], dim=1)
    q = rope.rotate(attention.queries(low, weights, config), by)
    read = rows.all[numbers.clamp(min=0)]
    return rope.rotate(attention.attend(q, read, numbers >= 0, weights.sinks), by, inverse=True)


class _Picks:
    """The compressed rows that the tokens of a sequence read: the source's pick, or a new one."""

    def __init__(self, run: LayerRun, sequence: int) -> None:
        self._run = run
        self._sequence = sequence
        reads = bool(run.ratio) and run.weights.indexer is None
        self._given = run.read(Slot.PICKS, sequence) if reads else None
        self._new: list[Tensor] = []
        self._blocks: list[Tensor] = []
        among = run.weights.indexer is not None and run.picks_among
        self._allowed = run.read(Slot.BLOCKS, sequence) if among else None

    def of(
        self, tokens: slice, x: Tensor, low: Tensor, by: rope.Turns, rows: _Rows
    ) -> Tensor | None:
        """Numbers of compressed rows, ``[n, k]``, -1 where there are fewer."""
        run = self._run
        if not run.ratio:
            return None
        if self._given is not None:
            picked = self._given[tokens].long()
        else:
            picked = self._pick(tokens, x, low, by, rows)
        # The best come first and early tokens see few: the rest of the columns is empty.
        n_most = tokens.stop // run.ratio
        return picked[:, :n_most]

    def keep(self) -> None:
        """Leave new picks and candidates to the layers that follow."""
        for slot, made in ((Slot.PICKS, self._new), (Slot.BLOCKS, self._blocks)):
            if made:
                self._run.state.write(slot, self._sequence, torch.cat(made))

    def _pick(self, tokens: slice, x: Tensor, low: Tensor, by: rope.Turns, rows: _Rows) -> Tensor:
        run, config = self._run, self._run.config
        assert rows.keys is not None
        assert run.weights.indexer is not None
        positions = torch.arange(tokens.start, tokens.stop, device=x.device)
        finished = compression.finished(positions, len(rows.keys), run.ratio)
        wanted = indexer.scores(x, low, by, rows.keys, run.weights.indexer, config)
        candidate = config.candidate
        if self._allowed is not None:
            assert candidate is not None
            allowed = indexer.rows_of_blocks(self._allowed[tokens], len(rows.keys), candidate)
            wanted = torch.where(allowed, wanted, -torch.inf)
        picked = indexer.best(wanted, finished, config.index_top_k)
        self._new.append(picked.to(torch.int32))
        if candidate and run.layer == candidate.source_layer:
            self._blocks.append(indexer.candidate_blocks(wanted, finished, candidate))
        return picked


def _route(
    run: LayerRun, sequence: int, tokens: slice, streams: Tensor, pre: Tensor, out: Chunk
) -> None:
    """Inputs, route and mixes of the experts; the mix after them is the next layer's first."""
    weights, config = run.weights, run.config
    place = out.place(sequence, tokens)
    mix = hyper_connection.mixes(streams, weights.ffn_mix, config)
    collapsed = hyper_connection.collapse(streams, pre)
    out.x[place] = rms(collapsed, config.rms_eps, weights.ffn_norm)
    out.post[place], out.comb[place], out.pre[place] = mix.post, mix.comb, mix.pre
    chosen = moe.route(out.x[place], weights.router, config)
    out.experts[place], out.gates[place] = chosen.experts, chosen.gates
