"""Every tensor a checkpoint must hold, from its config.json alone, and the digest of a list."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from pipeline.digest import canonical_json, sha256
from pipeline.model.config import ModelConfig
from pipeline.model.expected import v4, v41
from pipeline.source.spec import TensorSpec

_FAMILIES = {"v4.1": v41.tensors, "v4": v4.tensors}


@lru_cache(maxsize=4)
def expected_tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Name, dtype and shape of every stored tensor of ``config``'s checkpoint, sorted by name.

    The released configs give 96,085 tensors (V4.1-Flash) and 72,317 (V4-Flash-0731).
    """
    return tuple(sorted(_FAMILIES[config.family](config), key=lambda spec: spec.name))


def structure_digest(specs: Iterable[TensorSpec]) -> str:
    """Hex sha256 over dtype, name, shape and size of every tensor, independent of their order.

    The byte form (compact JSON, sorted keys, one final newline) is the one that the OpenTallas
    project records for the released shard headers, so digests can be compared with public ones.
    """
    records = [
        {"dtype": s.dtype, "name": s.name, "shape": list(s.shape), "size_bytes": s.nbytes}
        for s in sorted(specs, key=lambda spec: spec.name)
    ]
    return sha256(canonical_json(records) + b"\n")
