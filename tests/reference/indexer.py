"""The indexer: which compressed rows a token reads, and what later indexers may choose from.

Source: DeepSeek-V4.1-Flash inference/model.py (class Indexer). Sides taken where sources differ:

* Layers that follow an index source reuse its pick row for row (one branch lets them read all).
* Every layer scores against the keys of its own source. The published decode loop leaves another
  layer's keys in a shared slot on steps that finish no group; its prefill does not, and is right.
* The candidate mask is real; some engines leave it out, which shows only where it binds. Rows
  outside of it come last but are not refused: where top-k is larger than the candidates, the
  official code fills up with them, in no defined order. Here the lower ones go first.
* Equal scores fall to the lower row; the official code leaves their order open.
* No Hadamard rotation: V4 had one.
"""

from __future__ import annotations

import numpy as np

from tests.reference import rope
from tests.reference.arrays import Floats, Ints, Mask
from tests.reference.hyperparameters import Candidates
from tests.reference.layer import Layer
from tests.reference.norm import rms


def keys(latents: Floats, positions: Ints, layer: Layer, rates: Floats) -> Floats:
    """Index keys ``[n, index_dim]``, rotated, of latents that are not."""
    plain = latents @ layer("indexer.attn_k.weight").T
    normed = rms(plain, layer.h.rms_eps, layer("indexer.k_norm.weight"))
    return rope.rotate(normed, positions, rates)


def scores(
    x: Floats, low: Floats, positions: Ints, index_keys: Floats, layer: Layer, rates: Floats
) -> Floats:
    """How much each token wants each compressed row, ``[T, n]``."""
    h = layer.h
    q = (low @ layer("indexer.attn_q_b.weight").T).reshape(len(x), h.index_heads, h.index_dim)
    matches = affinity(rope.rotate(q, positions, rates), index_keys)
    # The constant changes no pick; it is the official one all the same.
    votes = x @ layer("indexer.proj.weight").T * (h.index_dim * h.index_heads) ** -0.5
    return np.einsum("th,thn->tn", votes, matches, optimize=True)


def affinity(q: Floats, index_keys: Floats) -> Floats:
    """Products ``[T, heads, n]``, negative ones cut to zero."""
    return np.maximum(np.einsum("thd,nd->thn", q, index_keys, optimize=True), 0)


def best(wanted: Floats, allowed: Mask, count: int) -> Mask:
    """The ``count`` highest allowed scores of each token, or all where there are fewer."""
    ranked = np.where(allowed, wanted, -np.inf)
    order = np.argsort(-ranked, axis=-1, kind="stable")[:, :count]
    picked = np.zeros_like(allowed)
    np.put_along_axis(picked, order, values=True, axis=-1)
    return picked & allowed


def candidate_rows(wanted: Floats, finished: Mask, candidates: Candidates) -> Mask:
    """Rows of the best blocks of each token; the block of its newest row is always among them."""
    n_tokens, n_rows = wanted.shape
    n_blocks = -(-n_rows // candidates.block)
    padded = np.full((n_tokens, n_blocks * candidates.block), -np.inf, wanted.dtype)
    padded[:, :n_rows] = np.where(finished, wanted, -np.inf)
    blocks = padded.reshape(n_tokens, n_blocks, candidates.block).max(axis=-1)
    # Rows finish in order, so their number says which is newest.
    newest = np.maximum(finished.sum(axis=-1) - 1, 0) // candidates.block
    np.put_along_axis(blocks, newest[:, None], np.inf, axis=-1)
    kept = best(blocks, blocks > -np.inf, candidates.count)
    return np.repeat(kept, candidates.block, axis=-1)[:, :n_rows]
