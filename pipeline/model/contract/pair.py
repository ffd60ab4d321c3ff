"""Whether a draft belongs to a target: what a running pair must agree on.

Source: llama.cpp pull request 25784 (the draft is given rows of the target's layers and gives it
tokens). Each file may be good on its own, and hardly any engine says that two do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import FormatError
from pipeline.gguf.keys import Scalar
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.form import form_of
from pipeline.model.contract.sizes import vocabulary_of
from pipeline.model.form import Form
from pipeline.model.metadata.header_keys import HeaderKeys

_SAME_SIZES = (
    "embedding_length",
    "attention.head_count",
    "attention.key_length",
    "attention.value_length",
    "hyper_connection.count",
)

_SAME_KEYS = (
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.mask_token_id",
    "quantmill.source.config_sha256",
)
"""The last tells revisions of one model apart, whose shapes are the same."""

_SHIFT = {"v4.1": 0, "v4": 1}
"""How far past the last layer a captured layer may be.

Engines capture the input of a layer. V4's drafts count outputs, each the next layer's input; after
the last layer that is what the whole stack gives.
"""

_Value = Scalar | tuple[Scalar, ...] | None


@dataclass(frozen=True, slots=True)
class _Side:
    model: GgufModel
    form: Form

    @property
    def file(self) -> str:
        return str(self.model.files[0].path)

    @property
    def keys(self) -> HeaderKeys:
        return HeaderKeys(self.model.key_values, self.form.architecture)

    def value(self, key: str) -> _Value:
        entry = self.model.key_values.get(key)
        return None if entry is None else entry.value


def check_pair(target: GgufModel, draft: GgufModel) -> list[FormatError]:
    """Everything that keeps ``draft`` from drafting for ``target``; what one does not say passes.

    Where the models differ altogether, that is the one problem.

    Raises:
        FormatError: One of them has no form that this project knows.
    """
    pair = _Side(target, form_of(target)), _Side(draft, form_of(draft))
    forms = [side.form for side in pair]
    if forms[0].is_draft or not forms[1].is_draft:
        found = " and ".join(map(str, forms))
        return [_problem(pair, "these are no target and its draft", "a target and a dflash", found)]
    return list(_differing(pair, "family", *(form.family for form in forms))) or [
        *_check_sizes(pair),
        *_check_captured(pair),
        *_check_mask(pair),
    ]


def _check_sizes(pair: tuple[_Side, _Side]) -> Iterator[FormatError]:
    yield from _differing(pair, "vocab_size", *(vocabulary_of(s.model, s.form) for s in pair))
    for name in _SAME_SIZES:
        yield from _differing(pair, name, *(side.keys.find_number(name) for side in pair))
    for key in _SAME_KEYS:
        yield from _differing(pair, key, *(side.value(key) for side in pair))


def _check_captured(pair: tuple[_Side, _Side]) -> Iterator[FormatError]:
    """The layers whose input the draft is given are layers of the target."""
    target, draft = pair
    layers = draft.keys.find_numbers("target_layers")
    n_layers = target.keys.find_number("block_count")
    if not layers or n_layers is None:
        return
    last = n_layers - 1 + _SHIFT[target.form.family]
    if max(layers) > last:
        is_v4_count = max(layers) == n_layers
        yield _problem(
            pair,
            f"{draft.keys.full('target_layers')} are not among the target's layers",
            f"up to {last}",
            list(layers),
            "They count outputs, as V4's do; V4.1's count inputs." if is_v4_count else None,
        )


def _check_mask(pair: tuple[_Side, _Side]) -> Iterator[FormatError]:
    target, draft = pair
    key = "tokenizer.ggml.mask_token_id"
    mask, n_vocab = draft.value(key), vocabulary_of(target.model, target.form)
    if isinstance(mask, int) and n_vocab is not None and not 0 <= mask < n_vocab:
        yield _problem(pair, f"{key} is no token of the target", f"below {n_vocab:,}", mask)


def _differing(
    pair: tuple[_Side, _Side], what: str, ours: _Value, theirs: _Value
) -> Iterator[FormatError]:
    """A problem where both say ``what`` and say it differently."""
    if ours is None or theirs is None or ours == theirs:
        return
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        what, ours, theirs = _first_difference(what, ours, theirs)
    yield _problem(
        pair,
        f"target and draft differ in {what}",
        f"{ours}, as the target has it",
        f"{theirs} in the draft",
    )


def _first_difference(
    what: str, ours: tuple[Scalar, ...], theirs: tuple[Scalar, ...]
) -> tuple[str, Scalar, Scalar]:
    """Lists are long: their lengths, or the first place where they differ."""
    if len(ours) != len(theirs):
        return f"the length of {what}", len(ours), len(theirs)
    at = next(n for n, both in enumerate(zip(ours, theirs, strict=True)) if both[0] != both[1])
    return f"entry {at} of {what}", ours[at], theirs[at]


def _problem(
    pair: tuple[_Side, _Side],
    what: str,
    expected: object,
    found: object,
    next_step: str | None = None,
) -> FormatError:
    return FormatError(
        what,
        file=" and ".join(side.file for side in pair),
        expected=expected,
        found=found,
        next_step=next_step,
    )
