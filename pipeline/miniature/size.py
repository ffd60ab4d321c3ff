"""How small a miniature of V4.1 is, and the config.json that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from pipeline.miniature.released import JsonObject, config_of
from pipeline.miniature.size_rules import MIN_VOCAB, refuse_misfits
from pipeline.miniature.vocabulary import Vocabulary
from pipeline.model.config import read_config
from pipeline.model.engram.arithmetic import row_counts
from pipeline.model.tokens.token_map import compress_vocabulary

N_WINDOW_LAYERS = 2
"""The first layers see a sliding window only, as in the release."""

_MIN_LAYERS = 6


@dataclass(frozen=True, slots=True)
class MiniatureSize:
    """Sizes of a generated V4.1 checkpoint; what is not named here follows from these.

    The default is about 75 MB. ``engram_base`` is the number from which the bucket primes count:
    each table gets ``3 * engram_heads`` buckets of about that many rows.
    """

    release: ClassVar[str] = "v4.1-flash"

    n_layers: int = 8
    hidden: int = 512
    expert_ff: int = 256
    n_experts: int = 16
    n_experts_used: int = 4
    n_heads: int = 4
    head_dim: int = 256
    q_lora: int = 256
    o_lora: int = 128
    o_groups: int = 2
    index_heads: int = 16
    engram_base: int = 1000
    engram_heads: int = 4
    n_draft_experts: int = 8
    n_draft_experts_used: int = 2
    vocab_size: int = 1280
    vision_layers: int = 2
    vision_hidden: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that no checkpoint of this architecture can have.

        Raises:
            ConfigError: One size breaks a rule; several raise `Problems`.
        """
        least = {
            "n_layers": (self.n_layers, _MIN_LAYERS),
            "n_experts": (self.n_experts, self.n_experts_used),
            "n_experts_used": (self.n_experts_used, 1),
            "n_draft_experts": (self.n_draft_experts, self.n_draft_experts_used),
            "n_draft_experts_used": (self.n_draft_experts_used, 1),
            "engram_base": (self.engram_base, 2),
            "engram_heads": (self.engram_heads, 1),
            "vocab_size": (self.vocab_size, MIN_VOCAB),
            "index_heads": (self.index_heads, 1),
            "vision_layers": (self.vision_layers, 1),
            "vision_hidden": (self.vision_hidden, 1),
        }
        widths = {
            "hidden": (self.hidden, 1),
            "expert_ff": (self.expert_ff, 1),
            "head_dim": (self.head_dim, 1),
            "q_lora": (self.q_lora, 1),
            "n_heads * head_dim": (self.n_heads * self.head_dim, self.o_groups),
            "o_groups * o_lora": (self.o_groups * self.o_lora, 1),
        }
        refuse_misfits(least, widths)

    def config(self, vocabulary: Vocabulary) -> JsonObject:
        """config.json: the released keys in their order, small values.

        The engram's rows and the compressed vocabulary come from the same rules that a converter
        checks them by.
        """
        config = _without_engram(self, vocabulary)
        n_compressed = int(compress_vocabulary(vocabulary.tokenizer, self.vocab_size).max()) + 1
        engram = read_config(config).engram
        assert engram is not None
        text = cast("JsonObject", config["text_config"]) | {
            "engram_num_embeddings": list(row_counts(engram)),
            "engram_compressed_vocab_size": n_compressed,
        }
        return config | {"text_config": text}


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Which layer does what, by the release's own pattern stretched over ``n_layers``.

    40 layers give the released lists; six are enough for one layer of every kind.
    """

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    engram: tuple[int, ...]

    @classmethod
    def of(cls, n_layers: int) -> LayerKinds:
        """The pattern for ``n_layers`` trunk layers."""
        n_pooled = max(1, (n_layers - N_WINDOW_LAYERS) * 18 // 38)
        first_single = N_WINDOW_LAYERS + n_pooled
        n_single = n_layers - first_single
        pooled_sources = tuple(range(N_WINDOW_LAYERS, first_single, 6))
        singles = tuple(range(first_single, n_layers, 4 if n_single > 4 else 2))
        return cls(
            ratios=(0,) * N_WINDOW_LAYERS + (2,) * n_pooled + (1,) * n_single,
            kv_sources=(*pooled_sources, first_single),
            index_sources=(*pooled_sources, *singles),
            engram=(1, pooled_sources[-1]),
        )


def _without_engram(size: MiniatureSize, vocabulary: Vocabulary) -> JsonObject:
    """config.json whose engram rows and compressed vocabulary are still zero and one."""
    config = config_of(size.release)
    config["image_token_id"] = vocabulary.ids["image"]
    text = cast("JsonObject", config["text_config"])
    vision = cast("JsonObject", config["vision_config"])
    text |= {**_widths(size), **_layers(size), **_draft(size, vocabulary.ids["draft_mask"])}
    text |= {
        "engram_num_embeddings": [0, 0],
        "engram_vocab_size": size.engram_base,
        "engram_n_heads": size.engram_heads,
        "engram_compressed_vocab_size": 1,
    }
    vision |= {
        "num_hidden_layers": size.vision_layers,
        "hidden_size": size.vision_hidden,
        "num_attention_heads": max(1, size.vision_hidden // 64),
        "intermediate_size": 2 * size.vision_hidden,
    }
    return config


def _widths(size: MiniatureSize) -> JsonObject:
    return {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "moe_intermediate_size": size.expert_ff,
        "num_attention_heads": size.n_heads,
        "head_dim": size.head_dim,
        "q_lora_rank": size.q_lora,
        "o_lora_rank": size.o_lora,
        "o_groups": size.o_groups,
        "n_routed_experts": size.n_experts,
        "num_experts_per_tok": size.n_experts_used,
    }


def _layers(size: MiniatureSize) -> JsonObject:
    """Layer lists, and windows so short that a text of a few hundred tokens uses every path."""
    kinds = LayerKinds.of(size.n_layers)
    return {
        "num_hidden_layers": size.n_layers,
        "sliding_window": 64,
        "compress_ratios": [*kinds.ratios, 0, 0, 0],
        "kv_source_layer_ids": list(kinds.kv_sources),
        "index_source_layer_ids": list(kinds.index_sources),
        "index_n_heads": size.index_heads,
        "index_topk": 16,
        "candidate_source_layer_id": kinds.kv_sources[-1],
        "candidate_topk_blocks": 16,
        "engram_layer_ids": list(kinds.engram),
    }


def _draft(size: MiniatureSize, mask_token: int) -> JsonObject:
    return {
        "dspark_noise_token_id": mask_token,
        "dspark_target_layer_ids": list(range(size.n_layers - 3, size.n_layers)),
        "dspark_n_routed_experts": size.n_draft_experts,
        "dspark_num_experts_per_tok": size.n_draft_experts_used,
    }
