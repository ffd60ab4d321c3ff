"""Matrix products and the root mean square norm, which everything else is made of."""

from __future__ import annotations

from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` ``[..., n_in]`` times ``weight`` ``[n_out, n_in]``, in the type of ``weight``.

    The result has the type of ``x``: with weights in bfloat16 only the product itself is rounded.
    """
    return (x.to(weight.dtype) @ weight.mT).to(x.dtype)


def rms(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """``x`` over the root of its mean square (last axis), times ``gain`` where there is one.

    Source: DeepSeek-V4.1-Flash inference/model.py, class RMSNorm.
    """
    normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return normed if gain is None else normed * gain
