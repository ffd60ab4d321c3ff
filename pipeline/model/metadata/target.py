"""Every metadata key of a target file, from config.json and the tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ConfigError, FormatError
from pipeline.gguf.keys import KeyValue
from pipeline.model.config import ModelConfig
from pipeline.model.engram.keys import engram_keys
from pipeline.model.form import Form
from pipeline.model.metadata.trunk import general_keys, trunk_keys
from pipeline.model.metadata.vocabulary import Vocabulary, vocabulary_keys

_BETAS = (32.0, 1.0)
"""YaRN's two betas in llama.cpp's `deepseek4` (pull request 24162) and `deepseek41`, whatever the
file says."""


def target_metadata(
    config: ModelConfig,
    tokenizer: Vocabulary,
    token_map: NDArray[np.int32] | None,
    *,
    form: Form,
    file_type: int,
    name: str,
    extra: Sequence[KeyValue] = (),
) -> tuple[KeyValue, ...]:
    """The metadata of the first shard, in the order in which it is written.

    Shard numbers (``split.*``) and the alignment filler are the file writer's own.

    Args:
        config: The model.
        tokenizer: Its vocabulary, padded to ``config.vocab_size``.
        token_map: Raw id -> compressed id, ``[vocab_size]``; only models with an engram need it.
        form: Which loaders the file is for.
        file_type: See `pipeline.model.metadata.file_type.file_type_id`.
        name: ``general.name``.
        extra: Keys of the caller (sources, provenance), written last.

    Raises:
        ConfigError: A value of config.json has no GGUF form.
        SourceError: Tokenizer and config.json do not belong together.
        FormatError: ``extra`` holds a key that is already there.
    """
    _check_betas(config)
    engram: tuple[KeyValue, ...] = ()
    if form.layout is not None:
        assert token_map is not None
        engram = engram_keys(config, token_map, form.layout)
    return checked_once(
        (
            *general_keys(form.architecture.value, name, file_type),
            *trunk_keys(form.architecture.value, config),
            *engram,
            *vocabulary_keys(config, tokenizer),
            *extra,
        )
    )


def checked_once(keys: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
    """``keys``, none of which stands there twice.

    Raises:
        FormatError: One does.
    """
    twice = [key for key, n in Counter(entry.key for entry in keys).items() if n > 1]
    if twice:
        raise FormatError("metadata keys are given twice", found=", ".join(twice))
    return keys


def _check_betas(config: ModelConfig) -> None:
    betas = (config.rope_scaling.beta_fast, config.rope_scaling.beta_slow)
    if betas != _BETAS:
        raise ConfigError(
            "config.json rope_scaling has betas that llama.cpp does not read for this model",
            expected="beta_fast {:g}, beta_slow {:g}".format(*_BETAS),
            found="beta_fast {:g}, beta_slow {:g}".format(*betas),
            next_step="The file would load and compute other positions without a word.",
        )
