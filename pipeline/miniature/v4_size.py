"""How small a miniature of V4-Flash-0731 is, and the config.json that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.miniature.released import JsonObject, config_of
from pipeline.miniature.size_rules import MIN_VOCAB, refuse_misfits
from pipeline.miniature.vocabulary import Vocabulary

_N_WINDOW_LAYERS = 2
_N_HASH_LAYERS = 3
_N_STAGES = 3
_MIN_LAYERS = 5
_ORIGINAL_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class V4Size:
    """Sizes of a generated V4-Flash-0731 checkpoint; what is not named here follows from these.

    The default is about 50 MB. The draft stages have as many experts as a layer, as released.
    """

    release: ClassVar[str] = "v4-flash-0731"

    n_layers: int = 7
    hidden: int = 512
    expert_ff: int = 256
    n_experts: int = 12
    n_experts_used: int = 4
    n_heads: int = 4
    head_dim: int = 256
    q_lora: int = 256
    o_lora: int = 128
    o_groups: int = 2
    index_heads: int = 16
    vocab_size: int = 1280

    def __post_init__(self) -> None:
        """Refuse sizes that no checkpoint of this architecture can have.

        Raises:
            ConfigError: One size breaks a rule; several raise `Problems`.
        """
        least = {
            "n_layers": (self.n_layers, _MIN_LAYERS),
            "n_experts": (self.n_experts, self.n_experts_used),
            "n_experts_used": (self.n_experts_used, 1),
            "vocab_size": (self.vocab_size, MIN_VOCAB),
            "index_heads": (self.index_heads, 1),
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

        Window, index, clamp and the context that rope was made for are so small that a text of a
        few hundred tokens uses every path and shows a wrong value.
        """
        config = config_of(self.release)
        scaling = config["rope_scaling"]
        assert isinstance(scaling, dict)
        scaling["original_max_position_embeddings"] = _ORIGINAL_CONTEXT
        return config | {
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "index_n_heads": self.index_heads,
            "index_topk": 16,
            "max_position_embeddings": scaling["factor"] * _ORIGINAL_CONTEXT,
            "moe_intermediate_size": self.expert_ff,
            "n_routed_experts": self.n_experts,
            "num_attention_heads": self.n_heads,
            "num_experts_per_tok": self.n_experts_used,
            "num_hidden_layers": self.n_layers,
            "num_hash_layers": _N_HASH_LAYERS,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora,
            "q_lora_rank": self.q_lora,
            "sliding_window": 64,
            "swiglu_limit": 2.0,
            "vocab_size": self.vocab_size,
            "compress_ratios": [*layer_ratios(self.n_layers), *(0,) * _N_STAGES],
            "dspark_noise_token_id": vocabulary.ids["draft_mask"],
            "dspark_target_layer_ids": list(range(self.n_layers - _N_STAGES, self.n_layers)),
        }


def layer_ratios(n_layers: int) -> tuple[int, ...]:
    """Compression ratio of each layer: two windows, then 4 and 128 in turn, as released.

    43 layers give the released list; five are enough for one layer of every kind, for the third
    layer is both hash-routed and compressed.
    """
    compressed = (4 if layer % 2 == 0 else 128 for layer in range(_N_WINDOW_LAYERS, n_layers))
    return (*(0,) * _N_WINDOW_LAYERS, *compressed)
