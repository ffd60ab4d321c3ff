"""The vocabulary in a file's metadata: tokens, merges, special ids, chat template."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import SourceError
from pipeline.gguf.keys import KeyValue, ValueType, array, flag, text, u32
from pipeline.model.config import ModelConfig
from pipeline.model.tokens.chat_template import chat_template
from pipeline.model.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CarriedVocabulary:
    """The keys of a file that is made anew, as they stand there."""

    keys: tuple[KeyValue, ...]


Vocabulary = Tokenizer | CarriedVocabulary
"""Where the keys of a vocabulary come from: a checkpoint's tokenizer, or a file that has them."""


def vocabulary_keys(config: ModelConfig, tokenizer: Vocabulary) -> tuple[KeyValue, ...]:
    """The whole vocabulary with the chat template; a draft has the same as its target.

    Raises:
        SourceError: Tokenizer and config.json do not belong together.
    """
    if isinstance(tokenizer, CarriedVocabulary):
        return tokenizer.keys
    _check_tokenizer(config, tokenizer)
    return (
        *tokenizer_keys(tokenizer),
        text("tokenizer.chat_template", chat_template(config.family)),
    )


def tokenizer_keys(tokenizer: Tokenizer) -> tuple[KeyValue, ...]:
    """The vocabulary, without the chat template."""
    prefix = "tokenizer.ggml"
    return (
        text(f"{prefix}.model", "gpt2"),
        text(f"{prefix}.pre", tokenizer.pre),
        array(f"{prefix}.tokens", ValueType.STRING, tokenizer.tokens),
        array(f"{prefix}.token_type", ValueType.INT32, tokenizer.token_types),
        array(f"{prefix}.merges", ValueType.STRING, tokenizer.merges),
        u32(f"{prefix}.bos_token_id", tokenizer.bos),
        u32(f"{prefix}.eos_token_id", tokenizer.eos),
        u32(f"{prefix}.padding_token_id", tokenizer.pad),
        flag(f"{prefix}.add_bos_token", tokenizer.add_bos),
        flag(f"{prefix}.add_eos_token", tokenizer.add_eos),
    )


def _check_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> None:
    found = (len(tokenizer.tokens), tokenizer.bos, tokenizer.eos)
    expected = (config.vocab_size, config.bos_token, config.eos_token)
    if found != expected:
        raise SourceError(
            "tokenizer and config.json do not belong together",
            expected="{:,} tokens, bos {}, eos {}".format(*expected),
            found="{:,} tokens, bos {}, eos {}".format(*found),
        )
