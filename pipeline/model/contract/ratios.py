"""Compress ratios: one for each layer, and only such as the form's graph has.

Source: llama.cpp src/models/deepseek4.cpp (pull request 24162); each rule broken once in a running
engine. Which layers read whose compressed rows is V4.1's own affair, see `sources`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, Form
from pipeline.model.metadata.header_keys import HeaderKeys

_NAME = "attention.compress_ratios"

_ALLOWED: Mapping[Form, tuple[int, ...]] = {
    V4_TARGET: (0, 4, 128),
    V4_DRAFT: (0,),
    V41_DRAFT: (0,),
}


def check_ratios(entries: Mapping[str, KeyValue], form: Form) -> Iterator[FormatError]:
    """A problem where ratios are missing for layers, or where one is not among those allowed.

    The list may be longer: converters write config.json's, which goes on with the draft's stages.
    """
    keys = HeaderKeys(entries, form.architecture)
    ratios, n_layers = keys.find_numbers(_NAME), keys.find_number("block_count")
    if ratios is None or n_layers is None:
        return
    if len(ratios) < n_layers:
        yield FormatError(
            "compress_ratios is shorter than block_count",
            expected=f"{n_layers} ratios",
            found=len(ratios),
        )
    allowed = _ALLOWED.get(form, ratios)
    for layer, ratio in enumerate(ratios[:n_layers]):
        if ratio not in allowed:
            yield FormatError(
                f"layer {layer} compresses at ratio {ratio}, which {form.architecture} does not do",
                expected=" or ".join(map(str, allowed)),
                found=ratio,
            )
