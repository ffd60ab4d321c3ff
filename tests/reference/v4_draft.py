"""The DSpark draft of V4-Flash-0731: three V4 blocks that propose a block of tokens at once.

Sources: llama.cpp pull request 25784 (src/models/dflash.cpp, deepseek4.cpp) for what a draft sees
and how its tokens follow from each other, and the V4 classes of transformers
(modeling_deepseek_v4.py) for what a block does. Everything in double precision.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.reference.arrays import Floats, Ints
from tests.reference.norm import rms
from tests.reference.rope import rotate
from tests.reference.v4_weights import V4Weights

N_STAGES = 3


class V4Proposal(NamedTuple):
    """``logits`` ``[block, vocab]``, Markov term included; ``confidence`` ``[block]`` in (0, 1)."""

    logits: Floats
    confidence: Floats


class V4Draft:
    """The draft in a checkpoint; embedding and head are the trunk's."""

    def __init__(self, weights: V4Weights) -> None:
        self._w = weights
        self._c = weights.config
        pairs = np.arange(0, self._c["qk_rope_head_dim"], 2) / self._c["qk_rope_head_dim"]
        self._rates = self._c["rope_theta"] ** -pairs

    def propose(self, features: Floats, token: int) -> V4Proposal:
        """What may follow ``token``, which the trunk has chosen after ``features``.

        Args:
            features: ``[n, n_targets * hidden]``: for every position so far the outputs of the
                target layers, each the mean of its residual streams, side by side.
            token: The token of the next position.
        """
        w, c = self._w, self._c
        main = self._norm(features @ w["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")
        before = np.arange(len(features))
        places = len(features) + np.arange(c["dspark_block_size"])
        inputs = [token] + [c["dspark_noise_token_id"]] * (len(places) - 1)
        streams = np.repeat(w["embed.weight"][inputs][:, None], c["hc_mult"], axis=1)
        for stage in range(N_STAGES):
            prefix = f"mtp.{stage}."
            context = self._rows(main, before, prefix)
            x, mix = self._collapsed(streams, f"{prefix}hc_attn_")
            x = self._norm(x, f"{prefix}attn_norm.weight")
            streams = mix(self._attention(x, places, context, prefix))
            x, mix = self._collapsed(streams, f"{prefix}hc_ffn_")
            streams = mix(self._experts(self._norm(x, f"{prefix}ffn_norm.weight"), prefix))
        return self._chain(token, self._head(streams))

    def _norm(self, x: Floats, gain: str) -> Floats:
        return rms(x, self._c["rms_norm_eps"], self._w[gain])

    def _rows(self, x: Floats, positions: Ints, prefix: str) -> Floats:
        """The one row per position that is both key and value."""
        rows = self._norm(x @ self._w[f"{prefix}attn.wkv.weight"].T, f"{prefix}attn.kv_norm.weight")
        return rotate(rows, positions, self._rates)

    def _attention(self, x: Floats, positions: Ints, context: Floats, prefix: str) -> Floats:
        """Every place sees the whole block and the window of positions before itself."""
        c, w = self._c, self._w
        low = self._norm(x @ w[f"{prefix}attn.wq_a.weight"].T, f"{prefix}attn.q_norm.weight")
        q = (low @ w[f"{prefix}attn.wq_b.weight"].T).reshape(len(x), -1, c["head_dim"])
        q = rotate(rms(q, c["rms_norm_eps"]), positions, self._rates)
        rows = np.concatenate([context, self._rows(x, positions, prefix)])
        scores = np.einsum("thd,kd->thk", q, rows) / np.sqrt(c["head_dim"])
        is_seen = positions[:, None] - np.arange(len(rows)) < c["sliding_window"]
        scores = np.where(is_seen[:, None], scores, -np.inf)
        shares = _shares(scores, w[f"{prefix}attn.attn_sink"][None, :, None])
        read = rotate(
            np.einsum("thk,kd->thd", shares, rows), positions, self._rates, inverse=True
        ).reshape(len(x), c["o_groups"], -1)
        low_out = w[f"{prefix}attn.wo_a.weight"].reshape(c["o_groups"], -1, read.shape[-1])
        grouped = np.einsum("tgi,goi->tgo", read, low_out).reshape(len(x), -1)
        return grouped @ w[f"{prefix}attn.wo_b.weight"].T

    def _experts(self, x: Floats, prefix: str) -> Floats:
        """The shared expert and the best routed ones, weighted by their normalised scores."""
        c, w = self._c, self._w
        scores = np.sqrt(np.logaddexp(0, x @ w[f"{prefix}ffn.gate.weight"].T))
        ranked = np.argsort(-(scores + w[f"{prefix}ffn.gate.bias"]), axis=1, kind="stable")
        chosen = ranked[:, : c["num_experts_per_tok"]]
        shares = np.take_along_axis(scores, chosen, axis=1)
        shares *= c["routed_scaling_factor"] / shares.sum(axis=1, keepdims=True)
        out = self._expert(x, f"{prefix}ffn.shared_experts.")
        for at, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                out[at] += weight * self._expert(x[at], f"{prefix}ffn.experts.{expert}.")
        return out

    def _expert(self, x: Floats, prefix: str) -> Floats:
        limit, w = self._c["swiglu_limit"], self._w
        gate = np.minimum(x @ w[f"{prefix}w1.weight"].T, limit)
        up = np.clip(x @ w[f"{prefix}w3.weight"].T, -limit, limit)
        return (gate * _sigmoid(gate) * up) @ w[f"{prefix}w2.weight"].T

    def _collapsed(self, streams: Floats, prefix: str):
        """The streams' weighted sum, and how a sub-layer's output gets back into the streams."""
        c, w, n = self._c, self._w, self._c["hc_mult"]
        flat = rms(streams.reshape(len(streams), -1), c["rms_norm_eps"]) @ w[f"{prefix}fn"].T
        scale = np.repeat(w[f"{prefix}scale"], [n, n, n * n])
        pre, post, mixing = np.split(flat * scale + w[f"{prefix}base"], [n, 2 * n], axis=1)
        balanced = self._balanced(mixing.reshape(-1, n, n))
        pre, post = _sigmoid(pre) + c["hc_eps"], 2 * _sigmoid(post)

        def mix(out: Floats) -> Floats:
            return post[..., None] * out[:, None] + np.einsum("tjk,tjd->tkd", balanced, streams)

        return np.einsum("tn,tnd->td", pre, streams), mix

    def _balanced(self, mixing: Floats) -> Floats:
        """Rows and columns that sum to one, by dividing them in turn; columns first and last."""
        eps = self._c["hc_eps"]
        shares = np.exp(mixing - mixing.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True) + eps
        shares /= shares.sum(axis=-2, keepdims=True) + eps
        for _ in range(self._c["hc_sinkhorn_iters"] - 1):
            shares /= shares.sum(axis=-1, keepdims=True) + eps
            shares /= shares.sum(axis=-2, keepdims=True) + eps
        return shares

    def _head(self, streams: Floats) -> Floats:
        c, w = self._c, self._w
        flat = rms(streams.reshape(len(streams), -1), c["rms_norm_eps"]) @ w["mtp.2.hc_head_fn"].T
        pre = _sigmoid(flat * w["mtp.2.hc_head_scale"] + w["mtp.2.hc_head_base"]) + c["hc_eps"]
        return np.einsum("tn,tnd->td", pre, streams)

    def _chain(self, token: int, hidden: Floats) -> V4Proposal:
        """Each place's logits, given the likeliest token of the place before."""
        w = self._w
        logits = self._norm(hidden, "mtp.2.norm.weight") @ w["head.weight"].T
        confidence = np.empty(len(hidden))
        for place, row in enumerate(logits):
            before = w["mtp.2.markov_head.markov_w1.weight"][token]
            row += w["mtp.2.markov_head.markov_w2.weight"] @ before
            seen = np.concatenate([hidden[place], before])
            confidence[place] = _sigmoid(w["mtp.2.confidence_head.proj.weight"][0] @ seen)
            token = int(row.argmax())
        return V4Proposal(logits, confidence)


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _shares(scores: Floats, sink: Floats) -> Floats:
    """Softmax over the last axis and one more place, the sink, whose share goes nowhere."""
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    raised = np.exp(scores - top)
    return raised / (raised.sum(axis=-1, keepdims=True) + np.exp(sink - top))
