"""Every tensor of a draft: stages like blocks, and what leads into and out of them.

Sources: llama.cpp pull request 25784 for V4; vcruz305/llama.cpp src/models/dflash.cpp for V4.1.
"""

from __future__ import annotations

from pipeline.model.contract.shapes import Ne, bias, block, named, stream_head, vocabulary
from pipeline.model.contract.sizes import Sizes


def v41_draft_shapes(s: Sizes) -> dict[str, Ne]:
    """Names and dimensions of a draft that gives one stream."""
    assert s.draft is not None
    rank = s.draft.markov_rank
    wanted: dict[str, Ne] = {
        "fc.weight": (s.draft.n_captured * s.hidden, s.hidden),
        "enc.output_norm.weight": (s.hidden,),
        "output_norm.weight": (s.hidden,),
        "markov_w1.weight": (rank, s.n_vocab),
        "markov_w2.weight": (rank, s.n_vocab),
        "conf_proj.weight": (s.hidden + rank, 1),
        **vocabulary(s),
    }
    for stage in range(s.n_layers):
        wanted |= named(stage, {**block(s), **bias(s)})
    return wanted


def v4_draft_shapes(s: Sizes) -> dict[str, Ne]:
    """Names and dimensions of a draft that mixes its streams at the end, as V4 does."""
    return {**v41_draft_shapes(s), **stream_head(s)}
