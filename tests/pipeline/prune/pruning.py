"""Keep lists for a miniature, and cuts of it as the tasks make them."""

from __future__ import annotations

import random
from pathlib import Path

from pipeline.experts.choice import Choice
from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import KeepList
from pipeline.experts.origin import Origin
from pipeline.model.config import read_config
from pipeline.prune.plan import PrunedPlan, plan_pruned
from pipeline.source.checkpoint import Checkpoint, open_checkpoint


def keep_of(n_kept, *, n_experts=4, n_layers=6, top_k=2, seed=0) -> KeepList:
    """Other experts in every layer."""
    rng = random.Random(f"{seed} {n_kept}")
    layers = [sorted(rng.sample(range(n_experts), n_kept)) for _ in range(n_layers)]
    origin = Origin(f"{seed:064x}", "saliency.pt")
    choice = Choice("test", Honesty.TRUE_GATE, Criterion.REAP, n_experts, n_kept, (origin,))
    return KeepList(n_experts, top_k, tuple(map(tuple, layers)), (choice,))


def planned(folder: Path, keep: KeepList) -> tuple[Checkpoint, PrunedPlan]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, plan_pruned(checkpoint, read_config(checkpoint.config), keep)


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint by name: dtype, shape, bytes."""
    found = {}
    for file in open_checkpoint(folder).files.values():
        content = file.path.read_bytes()
        for tensor in file.tensors.values():
            piece = content[tensor.offset : tensor.offset + tensor.nbytes]
            found[tensor.name] = (tensor.dtype, tensor.shape, piece)
    return found


def expected(whole, keep: KeepList):
    """What is to be left of the tensors of `stored`, stated here again."""
    left = {}
    for name, (dtype, shape, content) in whole.items():
        words = name.split(".")
        if words[0] != "layers" or words[2:4] not in (["ffn", "experts"], ["ffn", "gate"]):
            left[name] = (dtype, shape, content)
            continue
        ids = keep.layers[int(words[1])]
        if words[3] == "gate":
            width = len(content) // shape[0]
            rows = b"".join(content[i * width : (i + 1) * width] for i in ids)
            left[name] = (dtype, (len(ids), *shape[1:]), rows)
        elif int(words[4]) in ids:
            words[4] = str(ids.index(int(words[4])))
            left[".".join(words)] = (dtype, shape, content)
    return left
