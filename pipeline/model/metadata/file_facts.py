"""What the keys of a finished V4.1 file say about engram tables and sources, whatever its layout.

Read from the file alone, made by this project or not, so that it can be said again: in the other
layout's words, or as a model's description.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.model.config import CandidateConfig
from pipeline.model.contract.sizes import ENGRAM_NAMES, layers_with
from pipeline.model.engram.arithmetic import layer_offsets, running_offsets, split_layers
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys

PREFIX = f"{Architecture.DEEPSEEK41}."
"""How the keys begin; no other architecture has two layouts."""

_CANDIDATE_NAMES = (
    ("attention.indexer.candidate_source_layer", "attention.candidate_source_layer_id",
     "attention.candidate.source_layer", "candidate_source_layer"),
    ("attention.indexer.candidate_block_size", "attention.candidate_block_size",
     "attention.candidate.block_size", "candidate_block_size"),
    ("attention.indexer.candidate_top_k_blocks", "attention.candidate_topk_blocks",
     "attention.candidate.topk_blocks", "candidate_top_k_blocks"),
)  # fmt: skip
"""Source layer, block size and count of the two-level selection, by the name each reader gives."""

_RELEASED = (40, 1 << 20, 512)
"""Layers, context and picks of the released model, whose nine-key files name no candidates."""

_RELEASED_CANDIDATE = CandidateConfig(source_layer=20, block_size=8, top_k=2048)
"""What readers of such files take instead (smalinin/llama.cpp src/models/deepseek41.cpp)."""


@dataclass(frozen=True, slots=True)
class HashFacts:
    """The hash constants: ``multipliers`` and ``sizes`` (bucket counts) hold one tuple per layer.

    ``pad_token`` is a raw token id.
    """

    layers: tuple[int, ...]
    max_ngram: int
    n_heads: int
    width: int
    multipliers: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    token_map: tuple[int, ...]
    pad_token: int

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(sum(sizes) for sizes in self.sizes)


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Which layers publish compressed rows and picks, and the two-level selection."""

    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate: CandidateConfig


def read_hash_facts(model: GgufModel, layout: Layout) -> HashFacts:
    """The hash constants of ``model``.

    Raises:
        FormatError: A key is missing, an array has a wrong length, or the offsets are not those of
            the layout.
    """
    keys, names = _keys(model), ENGRAM_NAMES[layout]
    layers = keys.numbers(names["layers"])
    max_ngram, n_heads = keys.number(names["max_ngram"]), keys.number(names["n_heads"])
    n_columns = (max_ngram - 1) * n_heads
    sizes = _per_layer(keys, names["sizes"], len(layers), n_columns)
    facts = HashFacts(
        layers=layers,
        max_ngram=max_ngram,
        n_heads=n_heads,
        width=keys.number(names["width"]),
        multipliers=_per_layer(keys, names["multipliers"], len(layers), max_ngram),
        sizes=sizes,
        token_map=keys.numbers("engram.token_map"),
        pad_token=_pad_token(model, keys, layout),
    )
    _check_offsets(keys, names["offsets"], facts, layout)
    return facts


def _keys(model: GgufModel) -> HeaderKeys:
    return HeaderKeys(model.key_values, Architecture.DEEPSEEK41)


def _per_layer(
    keys: HeaderKeys, name: str, n_layers: int, n_per_layer: int
) -> tuple[tuple[int, ...], ...]:
    flat = keys.numbers(name)
    if not n_layers or n_per_layer < 1 or len(flat) != n_layers * n_per_layer:
        raise FormatError(
            f"the array {PREFIX}{name} has another length than its layers and columns",
            expected=f"{n_layers * n_per_layer} entries",
            found=f"{len(flat)} entries",
        )
    return split_layers(flat, n_per_layer)


def _check_offsets(keys: HeaderKeys, name: str, facts: HashFacts, layout: Layout) -> None:
    rule = layer_offsets if layout is Layout.FORK else running_offsets
    wanted = [offset for of_layer in rule(facts.sizes) for offset in of_layer]
    if list(keys.numbers(name)) != wanted:
        raise FormatError(
            f"{PREFIX}{name} do not count the rows as the {layout} layout does",
            next_step="The file looks up wrong rows as it is; make it again from the checkpoint.",
        )


def _pad_token(model: GgufModel, keys: HeaderKeys, layout: Layout) -> int:
    """The raw pad id. Files with the nine keys only store what the token map makes of it."""
    token_map = keys.numbers("engram.token_map")
    raw = keys.find_number("engram.pad_token_id")
    if layout is Layout.MAINLINE or raw is not None:
        return _inside(keys.number("engram.pad_token_id") if raw is None else raw, token_map)
    compressed = keys.number("engram.pad_id")
    said = model.key_values.get("tokenizer.ggml.padding_token_id")
    pad = said.value if said is not None and isinstance(said.value, int) else -1
    if 0 <= pad < len(token_map) and token_map[pad] == compressed:
        return pad
    # Any id that the map takes there serves: a loader only ever looks at the mapped one.
    if compressed in token_map:
        return token_map.index(compressed)
    raise FormatError(f"{PREFIX}engram.pad_id is no id of the token map", found=compressed)


def _inside(pad: int, token_map: Collection[int]) -> int:
    if not 0 <= pad < len(token_map):
        raise FormatError(
            f"{PREFIX}engram.pad_token_id lies outside the token map",
            expected=f"below {len(token_map):,}",
            found=pad,
        )
    return pad


def read_source_facts(model: GgufModel) -> SourceFacts:
    """Source layers and candidates, from the keys or, where those are silent, from the tensors.

    Raises:
        FormatError: The file does not say how candidates are selected.
    """
    candidate = find_candidate(model)
    if candidate is None:
        raise FormatError(
            "the file does not say how candidate blocks are selected",
            expected=", ".join(PREFIX + names[0] for names in _CANDIDATE_NAMES),
            next_step="Without these keys an engine runs with the candidate mask silently off.",
        )
    return SourceFacts(*source_layers(model), candidate)


def source_layers(model: GgufModel) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers that publish compressed rows, and those that publish picks."""
    keys = _keys(model)
    kv_sources = keys.find_numbers("attention.kv_source_layers", "attention.kv_source_layer_ids")
    index_sources = keys.find_numbers(
        "attention.indexer.source_layers", "attention.index_source_layer_ids"
    )
    return (
        kv_sources or layers_with("attn_compressor_kv.weight", model.tensors),
        index_sources or layers_with("indexer.attn_q_b.weight", model.tensors),
    )


def find_candidate(model: GgufModel) -> CandidateConfig | None:
    """The two-level selection, where the file's keys or its sizes tell it."""
    keys = _keys(model)
    source, block_size, top_k = (keys.find_number(*names) for names in _CANDIDATE_NAMES)
    if source is not None and source >= 0 and block_size is not None and top_k is not None:
        return CandidateConfig(source, block_size, top_k)
    facts = ("block_count", "context_length", "attention.indexer.top_k")
    if tuple(map(keys.find_number, facts)) == _RELEASED:
        return _RELEASED_CANDIDATE
    return None
