"""What is known of finished layers: their sums, and the digests of the state they left.

A record is written after the state files have their names and before older ones go, so a layer with
a record never runs again. ``layer-07.json`` holds exact numbers: JSON writes floats so that they
read back the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline import files
from pipeline.digest import canonical_json
from pipeline.errors import OutputError
from pipeline.experts.accumulate import LayerSums
from pipeline.experts.saliency import Sum
from pipeline.observe.state import Digests

Halves = tuple[LayerSums, LayerSums]
"""The sums of even and of odd sequences."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The sums of a layer, and sha256 of every sequence in every state file that it wrote."""

    halves: Halves
    state: Digests


class Records:
    """The records of one run in ``folder``; those of another ``spec`` do not count."""

    def __init__(self, folder: Path, spec: str) -> None:
        self._folder = folder
        self._spec = spec

    def save(self, layer: int, record: LayerRecord) -> None:
        """Write the record of ``layer``, whole and durable."""
        content = {
            "spec": self._spec,
            "halves": [
                {str(name): values.tolist() for name, values in half.sums.items()}
                for half in record.halves
            ],
            "state": {name: list(digests) for name, digests in record.state.items()},
        }
        files.write_whole(self._path(layer), canonical_json(content))

    def load(self, n_layers: int) -> list[LayerRecord]:
        """The records of the first layers, up to the first one that has none.

        Raises:
            OutputError: A record is damaged.
        """
        records = []
        for layer in range(n_layers):
            path = self._path(layer)
            if not path.exists():
                break
            records.append(self._read(path))
        return records

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:02}.json"

    def _read(self, path: Path) -> LayerRecord:
        try:
            said = json.loads(files.read_bytes(path))
            if said["spec"] != self._spec:
                raise ValueError("another spec")
            one, other = map(_sums, said["halves"])
            return LayerRecord((one, other), said["state"])
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(
                "the record of a layer is damaged",
                file=path,
                found=str(error),
                next_step=f"Delete {self._folder} and start again.",
            ) from error


def _sums(said: Mapping[str, Sequence[float]]) -> LayerSums:
    return LayerSums({name: np.array(said[name], np.float64) for name in Sum})
