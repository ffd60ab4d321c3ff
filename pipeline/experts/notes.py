"""What a person should know of a number of experts, of a label, of how much was measured."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.experts.honesty import Honesty
from pipeline.experts.saliency import SaliencyTable

KERNEL_COUNTS = frozenset({1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 576})
"""Expert counts that vLLM's routing kernel for these models was compiled for
(``topk_softplus_sqrt_kernels.cu``); it refuses others with "Unsupported expert number"."""

_FUSED_MOST = 512
_FUSED_MORE = frozenset({288, 576})
"""llama.cpp's CUDA router runs in one kernel for powers of two up to 512, for 288 and for 576."""


def is_fused(n_experts: int) -> bool:
    """Whether llama.cpp's CUDA backend routes this many experts in one kernel."""
    is_power = n_experts > 0 and n_experts.bit_count() == 1
    return (is_power and n_experts <= _FUSED_MOST) or n_experts in _FUSED_MORE


def count_notes(n_kept: int) -> Iterator[str]:
    """What engines make of a model with ``n_kept`` experts a layer."""
    if n_kept not in KERNEL_COUNTS:
        below = max((n for n in KERNEL_COUNTS if n < n_kept), default=None)
        above = min((n for n in KERNEL_COUNTS if n > n_kept), default=None)
        near = " or ".join(str(n) for n in (below, above) if n)
        yield f"vLLM has no routing kernel for {n_kept} experts; it has one for {near}."
    if not is_fused(n_kept):
        yield (
            f"llama.cpp routes {n_kept} experts in several steps on a GPU; "
            "powers of two, 288 and 576 go in one."
        )


_LABELS = {
    Honesty.UNNORMALISED_GATE: (
        "The gates were measured before the model normalises and scales them: tokens with low "
        "scores count less than in REAP."
    ),
    Honesty.SOFTMAX_GATE: (
        "The gates are a softmax of the router's logits, chosen without its bias: not those of "
        "this model."
    ),
    Honesty.PROXY: "The numbers stand in for REAP; they do not measure it.",
}


def label_notes(honesty: Honesty) -> Iterator[str]:
    """What keeps saliency of this label from being called REAP."""
    if honesty in _LABELS:
        yield _LABELS[honesty]


def token_notes(table: SaliencyTable) -> Iterator[str]:
    """Layers that saw fewer tokens than others."""
    if table.tokens and min(table.tokens) < max(table.tokens):
        layer = table.tokens.index(min(table.tokens))
        yield (
            f"Layer {layer} was measured on {min(table.tokens):,} tokens, others on up to "
            f"{max(table.tokens):,}: its ranking is the less sure."
        )
