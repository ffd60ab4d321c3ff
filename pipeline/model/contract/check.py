"""What a loader demands of a finished V4.1 file, checked on the file itself.

The other oracles hold a file against its plan; this one holds it against a statement of its own
that shares no table with the writer: keys and types, values that must agree, every tensor with the
shape the file's keys imply, and the rules between layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, i32, u16
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.keys import check_keys
from pipeline.model.contract.sizes import read_sizes
from pipeline.model.contract.sources import check_candidates, check_sources
from pipeline.model.contract.tensors import check_tensors
from pipeline.model.contract.values import check_values
from pipeline.model.engram.dialect import recognise
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys

_ARCHITECTURE = "deepseek41"


def layout_of(model: GgufModel) -> Layout:
    """Which loaders ``model`` is for.

    Raises:
        FormatError: It is no `deepseek41` model, or one in a form that other projects made up; the
            form is named.
    """
    path = model.files[0].path
    architecture = model.key_values.get("general.architecture")
    if architecture is None or architecture.value != _ARCHITECTURE:
        raise FormatError(
            "the model is not of this architecture",
            file=path,
            expected=_ARCHITECTURE,
            found="none" if architecture is None else str(architecture.value),
        )
    dialect = recognise(model.tensors, model.key_values)
    if dialect.layout is None:
        raise FormatError(
            f"the model is a {_ARCHITECTURE} in a form that no common loader reads",
            file=path,
            expected=" or ".join(Layout),
            found=dialect.name,
            next_step="Convert the released checkpoint instead.",
        )
    return dialect.layout


def check_contract(model: GgufModel, layout: Layout, *, union: bool = True) -> list[FormatError]:
    """Everything about ``model`` that a loader of ``layout`` would refuse or silently misread.

    Args:
        model: Headers of all its files.
        layout: The loaders it is for.
        union: In the fork layout, also ask for the keys that single branches read beside the nine
            that all do. Files of other makers may lack them.

    Returns:
        One error per problem; none if the model is good.
    """
    problems = [
        *check_keys(model.key_values, layout, union=union),
        *check_values(model.key_values, layout),
        *_check_splits(model),
    ]
    keys = HeaderKeys(model.key_values)
    try:
        sizes = read_sizes(keys, layout, model.tensors)
    except FormatError as error:
        # Without sizes there is nothing to hold the tensors against; the missing key is named.
        return problems or [error]
    problems += check_sources(sizes)
    problems += check_candidates(keys, sizes)
    problems += check_tensors(model, sizes, layout)
    return problems


def _check_splits(model: GgufModel) -> Iterator[FormatError]:
    """Every shard says its number and their count; the first also how many tensors there are."""
    count = len(model.files)
    if count == 1:
        return
    for no, file in enumerate(model.files):
        wanted: list[KeyValue] = [u16("split.no", no), u16("split.count", count)]
        if no == 0:
            wanted.append(i32("split.tensors.count", len(model.tensors)))
        for entry in wanted:
            found = file.key_values.get(entry.key)
            if found != entry:
                yield FormatError(
                    f"{entry.key} does not fit this shard",
                    file=file.path,
                    expected=f"{entry.type.name} {entry.value}",
                    found="nothing" if found is None else f"{found.type.name} {found.value}",
                )
