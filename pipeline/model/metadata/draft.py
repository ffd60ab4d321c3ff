"""Every metadata key of a draft file (`dflash`), from config.json and the target's tokenizer.

Sources: llama.cpp pull requests 25173 and 25784 (DSpark, V4), and for V4.1 the forks whose drafts
are published: one file suits those that look for ``dsv41_semantics``, those that look for missing
``output_hc_*`` tensors, and mainline, which asks for ``hyper_connection.single_pass``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gguf.keys import KeyValue, ValueType, array, flag, u32
from pipeline.model.config import ModelConfig
from pipeline.model.form import Architecture
from pipeline.model.metadata.target import checked_once
from pipeline.model.metadata.trunk import general_keys, trunk_keys
from pipeline.model.metadata.vocabulary import Vocabulary, vocabulary_keys
from pipeline.model.targets.draft import draft_model

CAPTURED_LAYER_SHIFT = {"v4.1": 0, "v4": 1}
"""Engines capture the input of a layer. V4.1's ids mean inputs, V4's mean outputs: the next input.

A wrong number loads and costs nothing but accepted tokens (DeepSeek-V4.1 ``inference/model.py``;
llama.cpp pull request 25784 for V4)."""


def draft_metadata(
    config: ModelConfig,
    tokenizer: Vocabulary,
    *,
    file_type: int,
    name: str,
    extra: Sequence[KeyValue] = (),
) -> tuple[KeyValue, ...]:
    """The metadata of a draft file, in the order in which it is written.

    Args:
        config: The whole model, trunk and draft.
        tokenizer: The target's vocabulary.
        file_type: See `pipeline.model.metadata.file_type.file_type_id`.
        name: ``general.name``.
        extra: Keys of the caller, written last.

    Raises:
        ConfigError: A value of config.json has no GGUF form.
        SourceError: Tokenizer and config.json do not belong together.
        FormatError: ``extra`` holds a key that is already there.
    """
    prefix, draft = Architecture.DFLASH.value, config.draft
    shift = CAPTURED_LAYER_SHIFT[config.family]
    layers = [layer + shift for layer in draft.target_layers]
    return checked_once(
        (
            *general_keys(prefix, name, file_type),
            *trunk_keys(prefix, draft_model(config)),
            u32(f"{prefix}.block_size", draft.block_size),
            array(f"{prefix}.target_layers", ValueType.INT32, layers),
            *_flags(prefix, config.family),
            *vocabulary_keys(config, tokenizer),
            u32("tokenizer.ggml.mask_token_id", draft.mask_token),
            *extra,
        )
    )


def _flags(prefix: str, family: str) -> tuple[KeyValue, ...]:
    if family != "v4.1":
        return ()
    return (
        flag(f"{prefix}.hyper_connection.single_pass", value=True),
        flag(f"{prefix}.dsv41_semantics", value=True),
    )
