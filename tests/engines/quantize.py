"""Whole files quantized by the engines' own tools, and what this project makes of the same."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.gguf.reader import read_gguf
from pipeline.quant.backend import Quantizer
from pipeline.quant.ik import IkQuantizer
from pipeline.quant.types import TYPES, GgmlType
from tests.engines.process import DEADLINE_S

CHILD = Path(__file__).with_name("quantize_child.py")
IK_TOOL = IkQuantizer.package.path().parents[1] / "bin" / "llama-quantize"

KEPT = re.compile(r"_norm\.weight|ffn_gate_inp|tid2eid|_ape\.weight")
"""Matrices of one type: the tools leave most of them as they are, whatever they are told."""

LOOKED_UP = "token_embd.weight"
"""Multiplied with nothing, so that no importance is measured."""

Importance = Mapping[str, NDArray[np.float32]]
"""By tensor, [n_matrices, n_cols]."""


@dataclass(frozen=True)
class Source:
    """Matrices of a model in F32, each [n_matrices, n_rows, n_cols], by name."""

    files: Sequence[Path]
    values: Mapping[str, NDArray[np.float32]]

    @classmethod
    def read(cls, files: Sequence[Path]) -> Source:
        values = {}
        for path in files:
            content = path.read_bytes()
            for tensor in read_gguf(path).tensors.values():
                if (
                    len(tensor.ne) > 1
                    and tensor.type.name == "F32"
                    and not KEPT.search(tensor.name)
                ):
                    stored = np.frombuffer(content, "<f4", tensor.nbytes // 4, tensor.offset)
                    values[tensor.name] = stored.reshape(-1, *tensor.ne[1::-1])
        return cls(files, values)

    def dealt(self, names: Iterable[str], *, turn: int = 0) -> dict[str, GgmlType]:
        """A type for each matrix, in turn, the first one ``turn`` further on.

        F32 where rows are no multiple of its block, as in the smallest matrices.
        """
        types = [TYPES[name] for name in names]
        return {
            name: kind if values.shape[-1] % kind.block == 0 else TYPES["F32"]
            for n, (name, values) in enumerate(self.values.items(), turn)
            for kind in [types[n % len(types)]]
        }

    def importance(self) -> Importance:
        """Made up, as uneven as measured ones are."""
        draw = np.random.default_rng(4)
        return {
            name: draw.lognormal(0, 1.2, (len(values), values.shape[-1])).astype(np.float32)
            for name, values in self.values.items()
            if name != LOOKED_UP
        }

    def encoded(
        self, quantizer: Quantizer, types: Mapping[str, GgmlType], importance: Importance | None
    ) -> dict[str, bytes]:
        """What ``quantizer`` makes of each matrix, one call for each expert."""
        quantizer.prepare(set(types.values()))
        made = {}
        for name, kind in types.items():
            stack = self.values[name]
            weights = (importance or {}).get(name, [None] * len(stack))
            pairs = zip(stack, weights, strict=True)
            made[name] = b"".join(_encoded(quantizer, kind, *pair) for pair in pairs)
        return made


def _encoded(
    quantizer: Quantizer,
    kind: GgmlType,
    rows: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
) -> bytes:
    out = np.empty((len(rows), kind.row_nbytes(rows.shape[1])), np.uint8)
    quantizer.quantize(kind, np.ascontiguousarray(rows), out, importance)
    return out.tobytes()


def by_llama(
    libraries: Path,
    source: Source,
    target: Path,
    types: Mapping[str, GgmlType],
    importance: Importance | None,
) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of each matrix in what llama.cpp writes."""
    asked = {
        "source": str(source.files[0]),
        "target": str(target),
        "types": [(name, kind.type_id) for name, kind in types.items()],
        "importance": [(name, w.ravel().tolist()) for name, w in (importance or {}).items()],
    }
    _run([sys.executable, str(CHILD), str(libraries)], json.dumps(asked))
    return matrices_of(target, source)


def by_ik(
    source: Source,
    target: Path,
    types: Mapping[str, GgmlType],
    importance: Importance | None,
) -> dict[str, tuple[str, bytes]]:
    """The same by ik_llama.cpp's tool."""
    (file,) = source.files
    rules = ",".join(f"^{re.escape(name)}$={kind.name.lower()}" for name, kind in types.items())
    more = ["--ignore-imatrix-rules"]
    if importance is not None:
        matrix = target.with_name("imatrix.dat")
        write_importance(matrix, importance)
        more = ["--imatrix", str(matrix)]
    _run([str(IK_TOOL), *more, "--custom-q", rules, str(file), str(target), "Q8_0", "2"])
    return matrices_of(target, source)


def write_importance(path: Path, importance: Importance) -> None:
    """An importance matrix as ik_llama.cpp reads it: sums and the number of calls behind them."""
    content = struct.pack("<i", len(importance))
    for name, weights in importance.items():
        content += struct.pack("<i", len(name)) + name.encode()
        content += struct.pack("<ii", 1, weights.size) + weights.astype("<f4").tobytes()
    path.write_bytes(content + struct.pack("<ii", 1, 4) + b"text")


def matrices_of(path: Path, source: Source) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of those of the source's matrices that a file holds."""
    content, tensors = path.read_bytes(), read_gguf(path).tensors
    found = ((name, tensors[name]) for name in source.values if name in tensors)
    return {name: (t.type.name, content[t.offset : t.offset + t.nbytes]) for name, t in found}


def _run(command: Sequence[str], said: str = "") -> None:
    result = subprocess.run(
        command,
        input=said,
        capture_output=True,
        encoding="utf-8",
        errors="replace",  # they print parts of characters of the vocabulary
        timeout=5 * DEADLINE_S,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
