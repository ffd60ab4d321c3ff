"""tokenizer.json as the tokenizers library writes it: typed access and the shape this model needs.

llama.cpp does not run tokenizer.json; it has the splitting rules of known models built in and picks
them by name. So the rules in the file must be exactly those behind the name that is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from pipeline.errors import SourceError

T = TypeVar("T")

FILE = "tokenizer.json"

PRE_TOKENIZER = "joyai-llm"
"""llama.cpp's name for the DeepSeek-V3 splitting rules as V4 and V4.1 ship them."""

_NUMBERS = r"\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+"
    "[\r\n]*"
    r"|\s*"
    "[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = (_NUMBERS, _CJK, _WORDS)


def parse_object(content: bytes, file: str) -> Mapping[str, object]:
    """The JSON object in ``content``.

    Raises:
        SourceError: It is no JSON, or no object.
    """
    try:
        parsed: object = json.loads(content)
    except ValueError as error:
        raise SourceError("not valid JSON", file=file, found=str(error)) from error
    return as_kind(parsed, dict, "the file", file)


def as_kind(value: object, kind: type[T], what: str, file: str = FILE) -> T:
    """``value``, which must be a ``kind``.

    Raises:
        SourceError: It is something else.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SourceError(
            f"{what} has an unexpected form",
            file=file,
            expected=kind.__name__,
            found=type(value).__name__,
        )
    return value


def check_rules(tokenizer: Mapping[str, object]) -> str:
    """llama.cpp's name for the splitting rules of this tokenizer.

    Raises:
        SourceError: The rules are not those of DeepSeek-V4 and V4.1, so llama.cpp has no name for
            them that this project knows.
    """
    model = as_kind(tokenizer.get("model"), dict, "model")
    found = {
        "model type": model.get("type"),
        "byte_fallback": model.get("byte_fallback") or False,
        "ignore_merges": model.get("ignore_merges") or False,
        "normalizer": _normalizer_steps(tokenizer.get("normalizer")),
        "pre-tokenizer": _splits(tokenizer.get("pre_tokenizer")),
    }
    expected = {
        "model type": "BPE",
        "byte_fallback": False,
        "ignore_merges": False,
        "normalizer": (),
        "pre-tokenizer": _SPLITS,
    }
    for what, rule in expected.items():
        if found[what] != rule:
            raise SourceError(
                f"the tokenizer's {what} is not that of DeepSeek-V4/V4.1",
                file=FILE,
                expected=rule,
                found=found[what],
                next_step="Use the tokenizer.json that was released with the model.",
            )
    return PRE_TOKENIZER


def _normalizer_steps(normalizer: object) -> tuple[object, ...]:
    if normalizer is None:
        return ()
    steps = as_kind(normalizer, dict, "normalizer").get("normalizers")
    return tuple(steps) if isinstance(steps, list) else (normalizer,)


def _splits(pre_tokenizer: object) -> object:
    """The split patterns in order, if the whole has the known form; else what stands there."""
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    steps = pre_tokenizer.get("pretokenizers")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return pre_tokenizer
    *splits, last = steps or [{}]
    is_byte_level = (
        last.get("type") == "ByteLevel"
        and last.get("add_prefix_space") is False
        and last.get("use_regex") is False
    )
    isolated = [_isolated_pattern(step) for step in splits]
    return tuple(isolated) if is_byte_level and all(isolated) else pre_tokenizer


def _isolated_pattern(step: Mapping[str, object]) -> str | None:
    pattern = step.get("pattern")
    is_isolated = (step.get("type"), step.get("behavior"), step.get("invert")) == (
        "Split",
        "Isolated",
        False,
    )
    regex = pattern.get("Regex") if is_isolated and isinstance(pattern, dict) else None
    return regex if isinstance(regex, str) else None
