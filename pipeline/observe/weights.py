"""A layer's weights as the forward pass takes them: decoded from the checkpoint, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.forward.attention import AttentionWeights
from pipeline.forward.compression import CompressorWeights
from pipeline.forward.engram import EngramWeights
from pipeline.forward.hyper_connection import MixWeights
from pipeline.forward.indexer import IndexerWeights, KeyWeights
from pipeline.forward.moe import ExpertWeights, RouterWeights
from pipeline.model.config import ModelConfig
from pipeline.model.targets.tensor import matrix_ref
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.table_rows import table_rows
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.decode import F32
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef, TensorSpec

_ATTENTION = {
    "q_a": "attn.wq_a.weight",
    "q_a_norm": "attn.q_norm.weight",
    "q_b": "attn.wq_b.weight",
    "kv": "attn.wkv.weight",
    "kv_norm": "attn.kv_norm.weight",
    "sinks": "attn.attn_sink",
    "o_a": "attn.wo_a.weight",
    "o_b": "attn.wo_b.weight",
}
_KEYS = {"k": "attn.indexer.wk.weight", "norm": "attn.indexer.k_norm.weight"}
_INDEXER = {"q_b": "attn.indexer.wq_b.weight", "votes": "attn.indexer.weights_proj.weight"}
_ROUTER = {"weight": "ffn.gate.weight", "bias": "ffn.gate.bias"}
_COMPRESSOR_GATE = "attn.compressor.wgate.weight"

_Weights = TypeVar("_Weights")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Everything of a layer but its routed experts and its engram's table.

    ``compressor`` and ``keys`` where the layer makes compressed rows, ``indexer`` where it picks
    among them, ``engram`` where it has one.
    """

    attention_norm: Tensor
    attention: AttentionWeights
    attention_mix: MixWeights
    compressor: CompressorWeights | None
    keys: KeyWeights | None
    indexer: IndexerWeights | None
    ffn_norm: Tensor
    ffn_mix: MixWeights
    router: RouterWeights
    shared: ExpertWeights
    engram: EngramWeights | None


class WeightLoader:
    """Decodes matrices of a checkpoint into tensors.

    What the release stores in eight bits or fewer gets the type of matrices, the rest that of
    values.

    Args:
        checkpoint: Where they lie.
        reader: An open reader of it.
        config: The model.
        specs: Every stored tensor by name.
        arithmetic: Types and device.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: SourceReader,
        config: ModelConfig,
        specs: Mapping[str, TensorSpec],
        arithmetic: Arithmetic,
    ) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._config = config
        self._specs = specs
        self._arithmetic = arithmetic

    def ref(self, name: str) -> MatrixRef:
        """How the matrix ``name`` is stored."""
        return matrix_ref(self._specs[name], self._config)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, in the shape that it is stored in.

        Raises:
            SourceError: It does not fit the model, cannot be read, or changed since its header was.
            DecodeError: A value is NaN or infinite.
        """
        ref = self.ref(name)
        out = np.empty((ref.n_rows, ref.n_cols), np.float32)
        self.decode(ref, 0, out)
        values = self.placed(out, ref.codec)
        return values[0] if len(self._specs[name].shape) == 1 else values

    def decode(self, ref: MatrixRef, row_begin: int, out: F32) -> None:
        """Fill ``out`` with rows, and make sure that the file is still the one that was planned."""
        self._reader.decode_rows(ref, row_begin, out)
        self._reader.check_unchanged(ref)

    def buffer(self, shape: tuple[int, int]) -> F32:
        """Memory to decode into again and again, from which a device can copy at full speed."""
        is_gpu = not self._arithmetic.is_cpu
        buffer: F32 = torch.empty(shape, dtype=torch.float32, pin_memory=is_gpu).numpy()
        return buffer

    def row_blocks(self, name: str, n_rows: int) -> Iterator[Tensor]:
        """A matrix in blocks of rows, in order."""
        ref = self.ref(name)
        for begin in range(0, ref.n_rows, n_rows):
            out = np.empty((min(n_rows, ref.n_rows - begin), ref.n_cols), np.float32)
            self.decode(ref, begin, out)
            yield self.placed(out, ref.codec)

    def rows(self, name: str, numbers: NDArray[np.int64]) -> Tensor:
        """Rows of a table, ``[n, n_cols]``, in the type of values."""
        ref = self.ref(name)
        rows = table_rows(self._checkpoint, ref, numbers)
        self._reader.check_unchanged(ref)
        return self.placed(rows, Codec.F32)

    def layer(self, layer: int) -> LayerWeights:
        """The weights of a layer."""
        prefix = f"layers.{layer}."

        def load(name: str) -> Tensor:
            return self.tensor(prefix + name)

        def group(kind: Callable[..., _Weights], names: Mapping[str, str]) -> _Weights:
            return kind(**{field: load(name) for field, name in names.items()})

        def mix(part: str) -> MixWeights:
            return group(MixWeights, {f: f"hc_{part}_{f}" for f in ("fn", "base", "scale")})

        config = self._config
        makes_rows, picks = layer in config.kv_sources, layer in config.index_sources
        has_engram = config.engram is not None and layer in config.engram.layers
        return LayerWeights(
            attention_norm=load("attn_norm.weight"),
            attention=group(AttentionWeights, _ATTENTION),
            attention_mix=mix("attn"),
            compressor=self._compressor(prefix) if makes_rows else None,
            keys=group(KeyWeights, _KEYS) if makes_rows else None,
            indexer=group(IndexerWeights, _INDEXER) if picks else None,
            ffn_norm=load("ffn_norm.weight"),
            ffn_mix=mix("ffn"),
            router=group(RouterWeights, _ROUTER),
            shared=self._shared(f"{prefix}ffn.shared_experts."),
            engram=self._engram(f"{prefix}engram.") if has_engram else None,
        )

    def placed(self, values: F32, codec: Codec) -> Tensor:
        """Decoded values in their type, on the device; on a CPU maybe ``values`` themselves."""
        dtype = self._matrix_type if codec in (Codec.FP8, Codec.FP4) else self._arithmetic.values
        # The type changes on the device: half as wide a copy would have to be made on the host.
        return torch.from_numpy(values).to(self._arithmetic.device).to(dtype)

    @property
    def _matrix_type(self) -> torch.dtype:
        return self._arithmetic.matrices

    def _compressor(self, prefix: str) -> CompressorWeights:
        gate = prefix + _COMPRESSOR_GATE
        return CompressorWeights(
            kv=self.tensor(f"{prefix}attn.compressor.wkv.weight"),
            gate=self.tensor(gate) if gate in self._specs else None,
            norm=self.tensor(f"{prefix}attn.compressor.norm.weight"),
        )

    def _shared(self, prefix: str) -> ExpertWeights:
        gate, up, down = (self.tensor(f"{prefix}w{n}.weight") for n in (1, 3, 2))
        return ExpertWeights(torch.cat([gate, up]), down)

    def _engram(self, prefix: str) -> EngramWeights:
        gains = self.tensor(f"{prefix}q_weight") * self.tensor(f"{prefix}k_weight")
        return EngramWeights(self.tensor(f"{prefix}wkv.weight"), gains)


class ExpertStream:
    """Routed experts one after the other, decoded ahead in the background.

    Buffers are made once: memory that the system has to clear for every expert would cost more
    than decoding it. An expert's weights are good until the next one is asked for.

    Args:
        loader: Where they come from.
        config: The model.
        n_ahead: Experts that may be decoded while one is used; as many buffers more are held.
    """

    def __init__(self, loader: WeightLoader, config: ModelConfig, *, n_ahead: int) -> None:
        self._loader = loader
        shapes = ((2 * config.expert_ff, config.hidden), (config.hidden, config.expert_ff))
        self._buffers = [tuple(map(loader.buffer, shapes)) for _ in range(n_ahead + 1)]
        self._n_ahead = n_ahead

    def decoded(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Number and weights of each of ``experts``."""
        free, todo = deque(self._buffers), deque(experts)
        coming: deque[tuple[int, tuple[F32, ...], Future[None]]] = deque()
        with ThreadPoolExecutor(self._n_ahead, thread_name_prefix="decode") as pool:
            while todo or coming:
                while free and todo:
                    expert, buffer = todo.popleft(), free.popleft()
                    coming.append((expert, buffer, pool.submit(self._fill, layer, expert, buffer)))
                expert, buffer, done = coming.popleft()
                done.result()
                gate_up, down = (self._loader.placed(part, Codec.FP4) for part in buffer)
                yield expert, ExpertWeights(gate_up, down)
                free.append(buffer)

    def _fill(self, layer: int, expert: int, buffer: tuple[F32, ...]) -> None:
        gate_up, down = buffer
        n = len(gate_up) // 2
        parts = {"w1": gate_up[:n], "w3": gate_up[n:], "w2": down}
        for name, out in parts.items():
            ref = self._loader.ref(f"layers.{layer}.ffn.experts.{expert}.{name}.weight")
            self._loader.decode(ref, 0, out)
