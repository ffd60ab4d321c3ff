"""What a loader demands of a finished file, checked on the file itself.

The other oracles hold a file against its plan; this one holds it against a statement of its own
that shares no table with the writer: keys and types, values that must agree, every tensor with the
shape the file's keys imply, and the rules between layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import FormatError
from pipeline.gguf.model_file import SPLIT_NO, GgufModel, split_keys
from pipeline.model.contract.keys import check_keys
from pipeline.model.contract.ratios import check_ratios
from pipeline.model.contract.sizes import Sizes, read_sizes
from pipeline.model.contract.sources import check_candidates, check_sources
from pipeline.model.contract.tensors import check_tensors
from pipeline.model.contract.values import check_values
from pipeline.model.form import Architecture, Form
from pipeline.model.metadata.header_keys import HeaderKeys


def check_contract(model: GgufModel, form: Form, *, union: bool = True) -> list[FormatError]:
    """Everything about ``model`` that a loader of ``form`` would refuse or silently misread.

    Args:
        model: Headers of all its files.
        form: The loaders it is for.
        union: Also ask for the keys that only some loaders read, or that they do without. Files
            of other makers may lack them.

    Returns:
        One error per problem; none if the model is good.
    """
    return [_placed(problem, model) for problem in _problems(model, form, union=union)]


def _problems(model: GgufModel, form: Form, *, union: bool) -> list[FormatError]:
    problems = [
        *check_keys(model.key_values, form, union=union),
        *check_values(model.key_values, form),
        *check_ratios(model.key_values, form),
        *_check_splits(model),
    ]
    try:
        sizes = read_sizes(model, form)
    except FormatError as error:
        # Without sizes there is nothing to hold the tensors against; the missing key is named.
        return problems or [error]
    problems += _check_between_layers(model, sizes, form)
    problems += check_tensors(model, sizes, form)
    return problems


def _placed(problem: FormatError, model: GgufModel) -> FormatError:
    """``problem`` with the file it is in: the tensor's, or the first, which has the keys."""
    held = [f for f in model.files if problem.tensor in f.tensors]
    return FormatError(
        problem.what,
        file=problem.file or (held or model.files)[0].path,
        tensor=problem.tensor,
        expected=problem.expected,
        found=problem.found,
        next_step=problem.next_step,
    )


def _check_between_layers(model: GgufModel, sizes: Sizes, form: Form) -> Iterator[FormatError]:
    if form.architecture is Architecture.DEEPSEEK41:
        yield from check_sources(sizes)
        yield from check_candidates(HeaderKeys(model.key_values, form.architecture), sizes)


def _check_splits(model: GgufModel) -> Iterator[FormatError]:
    """Every shard says its number; the first also how many shards and tensors there are."""
    count = len(model.files)
    if count == 1:
        return
    for no, file in enumerate(model.files):
        for entry in split_keys(no, count, len(model.tensors)):
            found = file.key_values.get(entry.key)
            if found != entry and (no == 0 or entry.key == SPLIT_NO):
                yield FormatError(
                    f"{entry.key} does not fit this shard",
                    file=file.path,
                    expected=f"{entry.type.name} {entry.value}",
                    found="nothing" if found is None else f"{found.type.name} {found.value}",
                )
