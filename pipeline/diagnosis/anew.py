"""Whether a file can be written anew, every tensor in its type: asked before it is promised."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.errors import Problems, QuantmillError
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.form import form_of
from pipeline.model.contract.ratios import check_ratios
from pipeline.model.contract.values import check_values
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.form import Form
from pipeline.model.metadata.file_config import config_of
from pipeline.model.metadata.file_facts import read_source_facts
from pipeline.model.targets.trunk import target_tensors
from pipeline.requant.complete import completed
from pipeline.requant.targets import carried_targets, stored_targets

_SAID_AGAIN = re.compile(r"\.(engram|ple)\.")
"""Keys whose values are made again of the tables, those that only some readers know among them."""


def why_not_anew(model: GgufModel, form: Form) -> QuantmillError | None:
    """The first of what would stop a run that keeps every tensor of a target; nothing if none does.

    Headers alone: this is what such a run looks at before it begins, and what it holds the
    metadata of its own files against at the end.
    """
    try:
        return next(_problems(model, form), None)
    except Problems as error:
        return error.problems[0]
    except QuantmillError as error:
        return error


def _problems(model: GgufModel, form: Form) -> Iterator[QuantmillError]:
    made = completed(model).model
    yield from check_gguf_engram(made).problems
    if form.layout is not None:
        read_source_facts(made)
    config = config_of(made, form_of(made))
    frame = carried_targets(target_tensors(config, form.layout), made)
    stored_targets(frame, made, config, None)
    for problem in (*check_values(made.key_values, form), *check_ratios(made.key_values, form)):
        if not _SAID_AGAIN.search(problem.what):
            yield problem
