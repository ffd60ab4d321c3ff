"""Whether the values of a file can be had at all: some types only their maker's library decodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.errors import TypeRuleError
from pipeline.quant.dequant import can_decode
from pipeline.quant.types import TYPES
from pipeline.requant.twice import Typed, stored_types

_SHOWN = 8


def check_decodable(tensors: Iterable[Typed]) -> Iterator[TypeRuleError]:
    """A problem for each source type that is to become another and cannot be decoded here."""
    for name, made in _by_source_type(tensors).items():
        if not can_decode(TYPES[name]):
            more = f" and {len(made) - _SHOWN} more" if len(made) > _SHOWN else ""
            yield TypeRuleError(
                f"the source's {name} cannot be decoded here, so nothing else can be made of it",
                tensor=", ".join(target.name for target, _ in made[:_SHOWN]) + more,
                expected=f'{name}, or "source", in the recipe',
                found=", ".join(sorted({ggml_type.name for _, ggml_type in made})),
                next_step="pip install ik-llama-cpp-python: the library of ik_llama.cpp's types.",
            )


def _by_source_type(tensors: Iterable[Typed]) -> dict[str, list[Typed]]:
    found: dict[str, list[Typed]] = {}
    for target, ggml_type in tensors:
        stored = stored_types(target)
        for name in stored if stored != {ggml_type.name} else ():
            found.setdefault(name, []).append((target, ggml_type))
    return found
