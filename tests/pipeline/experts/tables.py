"""Small saliency tables, the hand example, and the files that other tools would write of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pipeline.experts.accumulate import accumulate
from pipeline.experts.honesty import Honesty
from pipeline.experts.origin import Origin
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import SaliencyTable, Sum

ROUTING = Routing(n_layers=3, n_experts=12, top_k=2, gate_sum=1.5)

HAND_IDS = np.array([[0, 2], [1, 2], [0, 2]])
HAND_SCORES = np.array([[0.8, 0.4, 0.3, 0.2], [0.1, 0.9, 0.3, 0.5], [0.6, 0.2, 0.1, 0.2]])
HAND_OUTPUTS = np.array([[[3, 4], [0, 2]], [[6, 8], [3, 4]], [[0, 1], [5, 12]]], np.float64)
"""Three tokens, the best two of four experts by score + (0, 0, 0.3, 0), gates scaled by 1.5."""


def hand_gates():
    scores = np.take_along_axis(HAND_SCORES, HAND_IDS, 1)
    return scores / scores.sum(1, keepdims=True) * 1.5


def hand_table() -> SaliencyTable:
    sums = accumulate(HAND_IDS, hand_gates(), HAND_OUTPUTS, 4).sums
    return table({name: values[None] for name, values in sums.items()}, tokens=(3,), top_k=2)


def table(
    sums,
    *,
    tokens=None,
    top_k=None,
    honesty=Honesty.TRUE_GATE,
    name="a",
    kind="test",
) -> SaliencyTable:
    sums = {Sum(key): np.array(values, np.float64) for key, values in sums.items()}
    return SaliencyTable(kind, honesty, (Origin(name * 64, name),), sums, tokens, top_k)


def random_table(seed: int, routing: Routing = ROUTING, n_tokens: int = 40, **facts):
    """What a model with these sizes would give: gates that add up, norms of another scale."""
    layers = [random_layer([seed, layer], routing, n_tokens) for layer in range(routing.n_layers)]
    sums = {name: [layer.sums[name] for layer in layers] for name in Sum}
    tokens = (n_tokens,) * routing.n_layers
    return table(sums, tokens=tokens, top_k=routing.top_k, **{"name": str(seed), **facts})


def random_layer(seed, routing: Routing, n_tokens: int):
    ids, gates, outputs = random_batch(seed, routing, n_tokens)
    return accumulate(ids, gates, np.linalg.norm(outputs, axis=-1), routing.n_experts)


def random_batch(seed, routing: Routing, n_tokens: int, hidden: int = 5):
    random = np.random.default_rng(seed)
    taste = random.standard_normal(routing.n_experts)
    scores = np.exp(random.standard_normal((n_tokens, routing.n_experts)) + taste)
    ids = np.argsort(-scores, 1)[:, : routing.top_k]
    gates = np.take_along_axis(scores, ids, 1)
    gates *= (routing.gate_sum or 1) / gates.sum(1, keepdims=True)
    return ids, gates, random.standard_normal((n_tokens, routing.top_k, hidden)) * 3


def assert_same(one: SaliencyTable, other: SaliencyTable) -> None:
    assert one.sums.keys() == other.sums.keys()
    for name, values in one.sums.items():
        np.testing.assert_array_equal(other.sums[name], values)
    for fact in ("kind", "honesty", "origins", "tokens", "top_k"):
        assert getattr(one, fact) == getattr(other, fact), fact


def observer_layers(source: SaliencyTable):
    """The dictionary that the published observer saves, of the same numbers."""
    import torch

    layers = {}
    for layer in range(source.shape[0]):
        counts, gates, norms, weighted = (torch.tensor(source.sums[name][layer]) for name in Sum)
        layers[layer] = {
            "total_tokens": torch.tensor(source.tokens[layer]),
            "expert_frequency": counts.to(torch.int64),
            "pairwise_expert_frequency": (counts[:, None] + counts).to(torch.int64),
            "ean_sum": norms,
            "ean_mean": (norms / counts.clamp(min=1)).float(),
            "weighted_expert_frequency_sum": gates,
            "weighted_ean_sum": weighted,
            "reap": (weighted / counts.clamp(min=1)).float(),
            "max_activations": torch.ones(len(counts)),
        }
    return layers


def profile_layers(source: SaliencyTable):
    """The JSON object that llama.cpp's profiler prints, six digits a number."""
    counts = source.sums[Sum.COUNTS]

    def means(name, layer):
        values = source.sums[name][layer] / np.maximum(counts[layer], 1)
        return [float(f"{value:.6g}") for value in values]

    return {
        str(layer): {
            "total_tokens": source.tokens[layer],
            "activation_counts": counts[layer].astype(int).tolist(),
            "activation_frequency": (counts[layer] / source.tokens[layer]).tolist(),
            "avg_gate_weight": means(Sum.GATES, layer),
            "ean_mean": means(Sum.NORMS, layer),
            "reap": means(Sum.WEIGHTED_NORMS, layer),
            "never_activated": int((counts[layer] == 0).sum()),
        }
        for layer in range(source.shape[0])
    }


def write_json(path: Path, value) -> Path:
    path.write_text(json.dumps(value))
    return path
