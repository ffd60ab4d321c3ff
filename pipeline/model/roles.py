"""Roles and sub-roles: what each tensor is for, told from its GGUF name.

The five roles follow the rule by which the published V4.1 files are counted (routed 120, engram 8,
attention 623, embedding 175, shared 120 = 1046 in the fork layout; engram 5 of 1043 in mainline).
Sub-roles cut across that rule where it is coarse: the indexer's projection counts as ``embedding``
there, yet a recipe that names the indexer means it too.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    """The five recipe roles, the draft file, and what no file carries (vision)."""

    ROUTED = "routed"
    ENGRAM = "engram"
    ATTENTION = "attention"
    EMBEDDING = "embedding"
    SHARED = "shared"
    DRAFT = "draft"
    VISION = "vision"


TARGET_ROLES = (Role.ROUTED, Role.ENGRAM, Role.ATTENTION, Role.EMBEDDING, Role.SHARED)
"""The roles of a target file, each of which a recipe gives a type. All of a draft is `DRAFT`."""

ROLE_TITLES = {
    Role.ROUTED: "routed experts",
    Role.ENGRAM: "engram",
    Role.ATTENTION: "attention + hyper-connection",
    Role.EMBEDDING: "embeddings, norm, output",
    Role.SHARED: "shared experts",
    Role.DRAFT: "draft (MTP)",
    Role.VISION: "vision",
}
"""Titles for reports."""


class SubRole(StrEnum):
    """What a recipe may address below a role."""

    ROUTED_GATE = "routed_gate"
    ROUTED_UP = "routed_up"
    ROUTED_DOWN = "routed_down"
    ENGRAM_TABLE = "engram_table"
    ENGRAM_DENSE = "engram_dense"
    ENGRAM_GATE = "engram_gate"
    ATTENTION = "attention"
    INDEXER = "indexer"
    COMPRESSOR = "compressor"
    HYPER_CONNECTION = "hyper_connection"
    TOKEN_EMBD = "token_embd"  # noqa: S105 - a tensor, no password
    OUTPUT = "output"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    DRAFT_INPUT = "draft_input"
    """Projection of the captured layers, side by side, to the draft's width."""
    MARKOV = "markov"
    CONFIDENCE = "confidence"
    DRAFT = "draft"
    """What of the module no draft file carries: the router bias of image tokens."""
    VISION = "vision"


class ReadMode(StrEnum):
    """How much of a tensor one token reads."""

    FULL = "full"
    SPARSE = "sparse"
    """Used experts out of all experts."""
    ROWS = "rows"
    """Looked-up rows only."""
    NONE = "none"
    """Not at all for text (the router bias of image tokens)."""


_ROLE_RULES = (
    (r"_exps", Role.ROUTED),
    (r"engram|^per_layer_token_embd\.", Role.ENGRAM),
    (r"_shexp", Role.SHARED),
    (r"attn|hc_", Role.ATTENTION),
    (r"", Role.EMBEDDING),
)

_SUB_ROLE_RULES = (
    (r"ffn_gate_exps", SubRole.ROUTED_GATE),
    (r"ffn_up_exps", SubRole.ROUTED_UP),
    (r"ffn_down_exps", SubRole.ROUTED_DOWN),
    (r"engram_embd|^per_layer_token_embd\.", SubRole.ENGRAM_TABLE),
    (r"engram_(wkv|kv)\.", SubRole.ENGRAM_DENSE),
    (r"engram_(q|k|gate)\.", SubRole.ENGRAM_GATE),
    (r"ffn_gate_shexp", SubRole.SHARED_GATE),
    (r"ffn_up_shexp", SubRole.SHARED_UP),
    (r"ffn_down_shexp", SubRole.SHARED_DOWN),
    (r"_norm\.|_norm$", SubRole.NORM),
    (r"\.bias$", SubRole.BIAS),
    (r"hc_", SubRole.HYPER_CONNECTION),
    (r"indexer", SubRole.INDEXER),
    (r"compressor", SubRole.COMPRESSOR),
    (r"attn", SubRole.ATTENTION),
    (r"ffn_gate_inp|ffn_gate_tid2eid", SubRole.ROUTER),
    (r"^token_embd\.", SubRole.TOKEN_EMBD),
    (r"^output\.", SubRole.OUTPUT),
    (r"^fc\.", SubRole.DRAFT_INPUT),
    (r"^markov_w[12]\.", SubRole.MARKOV),
    (r"^conf_proj\.", SubRole.CONFIDENCE),
)

_READ_RULES = (
    (r"_exps", ReadMode.SPARSE),
    (r"engram_embd|^per_layer_token_embd\.|^token_embd\.|tid2eid", ReadMode.ROWS),
    (r"exp_probs_b_vl", ReadMode.NONE),
    (r"", ReadMode.FULL),
)


def role_of(name: str) -> Role:
    """The role of a target tensor by its GGUF name; the first matching rule wins."""
    return next(role for rule, role in _ROLE_RULES if re.search(rule, name))


def sub_role_of(name: str) -> SubRole:
    """The sub-role of a target tensor by its GGUF name.

    Raises:
        KeyError: No rule knows the name; a file with such a tensor loads nowhere.
    """
    for rule, sub_role in _SUB_ROLE_RULES:
        if re.search(rule, name):
            return sub_role
    raise KeyError(name)


def read_mode_of(name: str) -> ReadMode:
    """How one token of text reads the tensor of this GGUF name."""
    return next(mode for rule, mode in _READ_RULES if re.search(rule, name))
