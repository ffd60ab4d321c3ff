"""The indexer: which compressed rows a token reads, and what later indexers may choose from.

Source: DeepSeek-V4.1-Flash inference/model.py (class Indexer), as its prefill computes: every layer
scores against the keys of its own source, layers that follow an index source reuse its pick. Of
equal scores the lower row comes first; the official code leaves their order open. Where fewer rows
are candidates than are picked, other rows fill up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeline.forward import rope
from pipeline.forward.linear import linear, rms
from pipeline.model.config import CandidateConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class KeyWeights:
    """``k`` ``[index_dim, d]``, ``norm`` ``[index_dim]``."""

    k: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """``q_b`` ``[index_heads * index_dim, q_lora]``, ``votes`` ``[index_heads, D]``."""

    q_b: Tensor
    votes: Tensor


def keys(latents: Tensor, by: rope.Turns, weights: KeyWeights, config: ModelConfig) -> Tensor:
    """Index keys ``[n, index_dim]``, rotated, of latents that are not."""
    return rope.rotate(rms(linear(latents, weights.k), config.rms_eps, weights.norm), by)


def scores(
    x: Tensor,
    low: Tensor,
    by: rope.Turns,
    index_keys: Tensor,
    weights: IndexerWeights,
    config: ModelConfig,
) -> Tensor:
    """How much each token wants each compressed row, ``[T, n]``.

    Args:
        x: Normed inputs of the layer, ``[T, D]``.
        low: Their low-rank queries.
        by: The tokens' turns.
        index_keys: ``[n, index_dim]``.
        weights: The layer's.
        config: The model.
    """
    q = linear(low, weights.q_b).view(len(x), config.index_heads, config.index_dim)
    matches = (rope.rotate(q, by) @ index_keys.mT).relu_()
    # The constant changes no pick; it is the official one all the same.
    votes = linear(x, weights.votes) * (config.index_dim * config.index_heads) ** -0.5
    return torch.bmm(votes[:, None, :], matches)[:, 0]


def best(wanted: Tensor, finished: Tensor, count: int) -> Tensor:
    """Numbers of the ``count`` best finished rows of each token, best first, ``[T, n]``.

    -1 where there are fewer; ``n`` is ``count``, or the number of all rows if that is less.
    """
    ranked = torch.where(finished, wanted, -torch.inf)
    order = ranked.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return torch.where(finished.gather(1, order), order, -1)


def candidate_blocks(wanted: Tensor, finished: Tensor, candidates: CandidateConfig) -> Tensor:
    """The best blocks of each token, ``[T, n_blocks]``; that of its newest row is among them."""
    n_rows, block = wanted.shape[1], candidates.block_size
    ranked = torch.where(finished, wanted, -torch.inf)
    padded = pad(ranked, (0, -n_rows % block), value=-torch.inf)
    blocks = padded.view(len(wanted), -1, block).amax(dim=-1)
    # Rows finish in order, so their number says which is newest.
    newest = (finished.sum(dim=-1) - 1).clamp(min=0) // block
    blocks.scatter_(1, newest[:, None], torch.inf)
    order = blocks.argsort(dim=-1, descending=True, stable=True)[:, : candidates.top_k]
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, order, value=True)
    return kept & (blocks > -torch.inf)


def rows_of_blocks(blocks: Tensor, n_rows: int, candidates: CandidateConfig) -> Tensor:
    """The rows ``[T, n_rows]`` of blocks ``[T, n_blocks]``."""
    return blocks.repeat_interleave(candidates.block_size, dim=-1)[:, :n_rows]
