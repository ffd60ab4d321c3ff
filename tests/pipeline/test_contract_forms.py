"""What plans write in each form passes the loader contract, and pairs belong together."""

from __future__ import annotations

import pytest

from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.contract.pair import check_pair
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import required_keys
from tests.gguf_builder import (
    draft_plan,
    full_config,
    full_plan,
    small_config,
    small_plan,
    small_v4_config,
    write_hollow,
)
from tests.gguf_forms import extra, with_tensors

V4 = "v4-flash-0731"

SMALL = {
    V41_MAINLINE: lambda: small_plan(Layout.MAINLINE),
    V41_FORK: lambda: small_plan(Layout.FORK),
    V4_TARGET: lambda: small_plan(Layout.MAINLINE, small_v4_config()),
    V41_DRAFT: lambda: draft_plan(small_config()),
    V4_DRAFT: lambda: draft_plan(small_v4_config()),
}
FULL = {
    V4_TARGET: (lambda: full_plan(Layout.MAINLINE, release=V4), 1328),
    V41_DRAFT: (lambda: draft_plan(full_config()), 78),
    V4_DRAFT: (lambda: draft_plan(full_config(V4)), 81),
}
EVERY = pytest.mark.parametrize("form", SMALL, ids=lambda form: f"{form} {form.family}")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[object, GgufModel]:
    """The small model of every form, headers only."""
    root = tmp_path_factory.mktemp("forms")
    return {
        form: read_model(write_hollow(plan(), root / str(no)))
        for no, (form, plan) in enumerate(SMALL.items())
    }


@EVERY
def test_planned_file_fulfils_the_contract_of_its_form(models, form):
    assert form_of(models[form]) == form
    assert [str(problem) for problem in check_contract(models[form], form)] == []


@EVERY
def test_planned_file_has_no_key_that_no_loader_asks_for(models, form):
    labels = {"general.type", "general.license", "quantmill.header_pad"}
    split = {"split.no", "split.count", "split.tensors.count"}
    assert models[form].key_values.keys() - required_keys(form).keys() <= labels | split


@pytest.mark.parametrize(
    ("form", "plan", "n_tensors"),
    [(form, *plan) for form, plan in FULL.items()],
    ids=[f"{form} {form.family}" for form in FULL],
)
def test_released_shapes_fulfil_the_contract(tmp_path, form, plan, n_tensors):
    model = read_model(write_hollow(plan(), tmp_path))
    assert len(model.tensors) == n_tensors
    assert form_of(model) == form
    assert [str(problem) for problem in check_contract(model, form)] == []


@pytest.mark.parametrize(
    ("target", "draft"),
    [(V41_MAINLINE, V41_DRAFT), (V41_FORK, V41_DRAFT), (V4_TARGET, V4_DRAFT)],
    ids=str,
)
def test_planned_target_and_draft_belong_together(models, target, draft):
    assert check_pair(models[target], models[draft]) == []


@EVERY
def test_no_other_form_fits(models, form):
    for other in SMALL.keys() - {form}:
        if other.architecture == form.architecture:
            assert check_contract(models[form], other), other


@EVERY
def test_engram_check_says_where_there_is_nothing_to_check(models, form):
    report = check_gguf_engram(models[form])
    assert report.problems == ()
    if form.layout is None:
        assert report.subject == f"{form.architecture}: a model without engram tables"
        assert [row.found for row in report.rows] == ["none"]
        (problem,) = check_gguf_engram(
            with_tensors(models[form], extra("blk.1.engram_q.weight"))
        ).problems
        assert "found blk.1.engram_q.weight. Only the target of V4.1 has them" in str(problem)
