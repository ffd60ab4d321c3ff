"""The second half of a layer for the sequences of a chunk: every expert once, over all its tokens.

What is added up is REAP's (arXiv 2510.13999, equation 9): gates as the model applies them and
outputs before the gate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipeline.experts.accumulate import LayerSums, accumulate
from pipeline.forward import hyper_connection, moe
from pipeline.observe.attention_pass import LayerRun
from pipeline.observe.chunk import EXPERT_TOKENS, Chunk, blocks
from pipeline.observe.records import Halves
from pipeline.observe.topology import Slot
from pipeline.observe.weights import ExpertStream


def use_experts(
    run: LayerRun, chunk: Chunk, stream: ExpertStream, advanced: Callable[[int], None]
) -> Halves:
    """Take the chunk's sequences through their experts and leave their streams to the next layer.

    Args:
        run: The layer.
        chunk: What its attention pass left.
        stream: Gives the experts.
        advanced: Told the number of every expert that is done.

    Returns:
        The sums of the chunk's even and odd sequences.
    """
    y = _shared(run, chunk)
    norms = torch.zeros(chunk.experts.numel(), dtype=torch.float64, device=y.device)
    pairs = _pairs_by_expert(chunk, run.config.n_experts)
    used = [expert for expert, own in enumerate(pairs) if len(own)]
    for expert, weights in stream.decoded(run.layer, used):
        for part in torch.split(pairs[expert], EXPERT_TOKENS):
            tokens = part // run.config.n_experts_used
            outputs = moe.expert(chunk.x[tokens], weights, run.config.swiglu_limit)
            norms[part] = torch.linalg.vector_norm(outputs, dim=-1, dtype=torch.float64)
            # An expert has no token twice, so the order of additions is that of the experts.
            y.index_add_(0, tokens, outputs.mul_(chunk.gates.view(-1)[part, None]))
        advanced(expert)
    _leave(run, chunk, y)
    return _sums(run, chunk, norms.view_as(chunk.gates))


def _shared(run: LayerRun, chunk: Chunk) -> Tensor:
    y = torch.empty_like(chunk.x)
    for tokens in blocks(chunk.n_tokens, EXPERT_TOKENS):
        y[tokens] = moe.expert(chunk.x[tokens], run.weights.shared, run.config.swiglu_limit)
    return y


def _pairs_by_expert(chunk: Chunk, n_experts: int) -> tuple[Tensor, ...]:
    """For each expert the places of its tokens in the flat route, ascending."""
    flat = chunk.experts.flatten()
    counts = flat.bincount(minlength=n_experts).tolist()
    return torch.split(flat.argsort(stable=True), counts)


def _leave(run: LayerRun, chunk: Chunk, y: Tensor) -> None:
    for sequence in chunk.numbers:
        streams = run.state.held(sequence).to(y.device)
        for tokens in blocks(len(streams), run.block):
            place = chunk.place(sequence, tokens)
            streams[tokens] = hyper_connection.expand(
                y[place], streams[tokens], chunk.post[place], chunk.comb[place]
            )
        run.state.write(Slot.STREAMS, sequence, streams)
        whole = chunk.place(sequence, slice(0, len(streams)))
        run.state.write(Slot.PRE, sequence, chunk.pre[whole].clone())


def _sums(run: LayerRun, chunk: Chunk, norms: Tensor) -> Halves:
    ids, gates, sizes = (part.cpu().numpy() for part in (chunk.experts, chunk.gates, norms))

    def of_half(parity: int) -> LayerSums:
        own = np.flatnonzero(chunk.parity.numpy() == parity)
        return accumulate(ids[own], gates[own], sizes[own], run.config.n_experts)

    return of_half(0), of_half(1)
