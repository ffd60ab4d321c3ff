"""The vocabulary of a finished file as its keys have it, and the few that it may lack."""

from __future__ import annotations

from pipeline.gguf.keys import KeyValue, flag, text, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.model.metadata.vocabulary import CarriedVocabulary
from pipeline.model.tokens.chat_template import chat_template

_PREFIX = "tokenizer."
_DRAFT_ONLY = "tokenizer.ggml.mask_token_id"
"""The token that a draft fills its block with, which its description says."""


def carried_vocabulary(model: GgufModel, family: str) -> CarriedVocabulary:
    """The keys of ``model``'s vocabulary, in their order, then those that it lacks.

    What is missing is what converters leave to engines: no token before or after a text, padding
    by the end token, and the model's own chat template.
    """
    kept = {
        key: entry
        for key, entry in model.key_values.items()
        if key.startswith(_PREFIX) and key != _DRAFT_ONLY
    }
    eos = kept.get("tokenizer.ggml.eos_token_id")
    spare: list[KeyValue] = [
        flag("tokenizer.ggml.add_bos_token", value=False),
        flag("tokenizer.ggml.add_eos_token", value=False),
        text("tokenizer.chat_template", chat_template(family)),
    ]
    if eos is not None and isinstance(eos.value, int):
        spare.insert(0, u32("tokenizer.ggml.padding_token_id", eos.value))
    lacking = [entry for entry in spare if entry.key not in kept]
    return CarriedVocabulary((*kept.values(), *lacking))
