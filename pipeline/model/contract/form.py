"""Which form a finished file has, told from the file alone, whoever made it.

How loaders tell the two drafts apart: mainline llama.cpp by ``hyper_connection.single_pass``,
JigSawPT and smalinin's branches by ``dsv41_semantics``, vcruz305's by the ``output_hc_*`` tensors
that only a V4 draft has (src/models/dflash.cpp of each).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.model.engram.dialect import recognise
from pipeline.model.form import (
    V4_DRAFT,
    V4_TARGET,
    V41_DRAFT,
    V41_FORK,
    V41_MAINLINE,
    Architecture,
    Form,
)
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys

V41_FLAGS = ("hyper_connection.single_pass", "dsv41_semantics")
"""Keys that call a draft a V4.1 draft."""

STREAM_HEAD = "output_hc_"
"""How the names of the tensors begin that mix V4's residual streams at the end."""

V41_FORMS: Mapping[Layout, Form] = {Layout.MAINLINE: V41_MAINLINE, Layout.FORK: V41_FORK}
"""The form of each layout of a V4.1 target."""


def form_of(model: GgufModel) -> Form:
    """Which loaders ``model`` is for.

    Raises:
        FormatError: It is of another architecture, a `deepseek41` in a form that other projects
            made up (the form is named), or a draft whose signs contradict each other.
    """
    entry = model.key_values.get("general.architecture")
    match entry.value if entry is not None else None:
        case Architecture.DEEPSEEK41:
            return _v41_form(model)
        case Architecture.DEEPSEEK4:
            return V4_TARGET
        case Architecture.DFLASH:
            return _draft_form(model)
        case other:
            raise FormatError(
                "the model is not of an architecture that this project writes",
                file=model.files[0].path,
                expected=" or ".join(Architecture),
                found="none" if other is None else str(other),
            )


def _v41_form(model: GgufModel) -> Form:
    dialect = recognise(model.tensors, model.key_values)
    if dialect.layout is None:
        raise FormatError(
            f"the model is a {Architecture.DEEPSEEK41} in a form that no common loader reads",
            file=model.files[0].path,
            expected=" or ".join(Layout),
            found=dialect.name,
            next_step="Convert the released checkpoint instead.",
        )
    return V41_FORMS[dialect.layout]


def _draft_form(model: GgufModel) -> Form:
    keys = HeaderKeys(model.key_values, Architecture.DFLASH)
    flags = {keys.full(name): keys.find(name) for name in V41_FLAGS}
    v41_signs = [f"{key} true" for key, value in flags.items() if value is True]
    v4_signs = [f"{key} false" for key, value in flags.items() if value is False]
    v4_signs += sorted(name for name in model.tensors if name.startswith(STREAM_HEAD))
    if v41_signs and v4_signs:
        raise FormatError(
            "the draft calls itself one of V4.1 and one of V4",
            file=model.files[0].path,
            expected="one kind of sign",
            found=f"V4.1 by {', '.join(v41_signs)}; V4 by {', '.join(v4_signs)}",
            next_step="One loader would take it for the one, another for the other.",
        )
    return V4_DRAFT if v4_signs else V41_DRAFT
