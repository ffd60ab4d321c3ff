"""What a draft is worth: how many of its tokens a target that decodes greedily keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.reference.draft import Draft
from tests.reference.trunk import Trunk


class Acceptance(NamedTuple):
    """Tokens tried, tokens kept."""

    n_drafted: int
    n_accepted: int


def acceptance(
    trunk: Trunk, draft: Draft, prompt: Sequence[int], continuation: Sequence[int]
) -> Acceptance:
    """Of a draft whose blocks are cut to what is still to be generated, as llama.cpp's server does.

    Args:
        trunk: Taps the layers that the draft wants.
        draft: Proposes a block after each token that the trunk has chosen itself.
        prompt: What is read first.
        continuation: What greedy decoding makes of it: drafting changes no token.
    """
    text, context = trunk.begin(), draft.begin()
    n_drafted = n_accepted = n_made = 0
    piece = list(prompt)
    while n_made < len(continuation):
        context.follow(text.read(piece).taps)
        last, ahead = continuation[n_made], continuation[n_made + 1 :]
        # The last token of a block is the trunk's own.
        tried = context.propose(last).tokens[: max(0, len(ahead) - 1)]
        n_kept = _n_equal(tried, ahead)
        n_drafted += len(tried)
        n_accepted += n_kept
        piece = [last, *tried[:n_kept]]
        n_made += len(piece)
    return Acceptance(n_drafted, n_accepted)


def _n_equal(tried: Sequence[int], wanted: Sequence[int]) -> int:
    pairs = zip(tried, wanted, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(tried))
