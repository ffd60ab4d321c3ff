"""The constants of one model, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """How rotations are slowed down for texts beyond the original context."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The coarse choice of ``count`` blocks of ``block`` rows that layer ``source`` makes."""

    source: int
    block: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramHash:
    """What turns the last tokens into table rows.

    Per engram layer: ``multipliers`` (one per position looked back), ``primes`` and ``offsets``
    (one per n-gram order and head, heads inner) and the name of the table that the rows belong to.
    ``pad`` is an id of the compressed vocabulary.
    """

    layers: tuple[int, ...]
    n_heads: int
    multipliers: tuple[tuple[int, ...], ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    tables: tuple[str, ...]
    token_map: tuple[int, ...]
    pad: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """What the draft adds: tokens per block, the token of unknown places, the layers it taps."""

    block: int
    noise_token: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Sizes and constants of a trunk, or of a draft (whose layers are its stages).

    ``ratios``: tokens per compressed row of each layer, 0 for a layer without any.
    ``clamps`` and ``shared_clamps``: limit of the activations, per layer.
    """

    n_layers: int
    vocab_size: int
    n_heads: int
    head_dim: int
    rotary_dim: int
    o_groups: int
    window: int
    ratios: tuple[int, ...]
    rms_eps: float
    rope_base: float
    compressed_rope_base: float
    yarn: Yarn | None
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    candidates: Candidates | None
    n_experts: int
    n_experts_used: int
    weights_scale: float
    normalise_weights: bool
    clamps: tuple[float, ...]
    shared_clamps: tuple[float, ...]
    n_streams: int
    hc_eps: float
    sinkhorn_passes: int
    engram: EngramHash | None = None
    draft: DraftShape | None = None
