"""What a model's description says: one frozen record per part, both models in one form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters (``rope_scaling``)."""

    kind: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """The n-gram tables: which layers hold one, how they are hashed, how many rows they have."""

    layers: tuple[int, ...]
    n_rows: tuple[int, ...]
    max_ngram: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token: int
    n_compressed: int

    @property
    def n_columns(self) -> int:
        """Rows read per token and layer: one per n-gram order (2 … max) and head."""
        return (self.max_ngram - 1) * self.n_heads


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """Two-level selection of compressed blocks (``candidate_*``)."""

    source_layer: int
    block_size: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The MTP/DSpark module: ``n_stages`` blocks with their own experts."""

    n_stages: int
    n_experts: int
    n_experts_used: int
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image encoder and its aligner."""

    n_layers: int
    hidden: int
    ff: int
    patch: int
    downsample: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's architecture. Counts are ``n_x``; widths carry the config's own meaning."""

    family: str
    vocab_size: int
    hidden: int
    expert_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    n_experts: int
    n_shared_experts: int
    n_experts_used: int
    n_hash_layers: int
    scoring_func: str
    norm_weights: bool
    weights_scale: float
    swiglu_limit: float
    rms_eps: float
    sliding_window: int
    context: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    candidate: CandidateConfig | None
    hc_mult: int
    hc_iterations: int
    hc_eps: float
    bos_token: int
    eos_token: int
    scale_block: tuple[int, int]
    engram: EngramConfig | None
    draft: DraftConfig
    vision: VisionConfig | None

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each of the ``n_layers`` trunk layers (0 = sliding window only)."""
        return self.compress_ratios[: self.n_layers]
