"""Small models of both families as config.json and headers describe them, without any file."""

import json
from pathlib import Path

from pipeline.model.config import read_config
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.header import SourceFile, SourceTensor

DATA = Path(__file__).parents[1] / "data"
N_LAYERS, N_STAGES = 3, 3
N_EXPERTS = {"v4.1": 6, "v4": 6}
N_DRAFT_EXPERTS = {"v4.1": 4, "v4": 6}
_RELEASED = {"v4.1": "deepseek-v4.1-flash", "v4": "deepseek-v4-flash-0731"}
_OF_BOTH = {
    "num_hidden_layers": N_LAYERS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "dspark_target_layer_ids": [0, 1, 2],
}
_SMALL = {
    "v4.1": _OF_BOTH
    | {
        "compress_ratios": [0, 2, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "engram_layer_ids": [1],
        "engram_num_embeddings": [64],
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    },
    "v4": _OF_BOTH | {"compress_ratios": [0, 4, 128, 0, 0, 0], "num_hash_layers": 1},
}
"""What makes a released config one of a few hundred tensors."""


def small_config(family, **changes):
    """config.json of a small model; a change to None takes the key away."""
    config = json.loads((DATA / f"{_RELEASED[family]}.config.json").read_bytes())
    config.pop("vision_config", None)
    text = config.get("text_config", config)
    text |= _SMALL[family] | changes
    for key in [key for key, value in changes.items() if value is None]:
        del text[key]
    return config


def small_model(family):
    return read_config(small_config(family))


def checkpoint_of(specs, *, total_size=None):
    """One shard per layer and stage; the index fits them."""
    shards = {}
    for spec in specs:
        shard = ".".join(spec.name.split(".")[:2]) + ".safetensors"
        tensor = SourceTensor(spec.name, spec.dtype, spec.shape, 0, spec.nbytes)
        shards.setdefault(shard, {})[spec.name] = tensor
    files = {name: SourceFile(Path(name), 0, 0, "", tensors) for name, tensors in shards.items()}
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    return Checkpoint(Path("model"), {}, "", "", files, weight_map, total_size)
