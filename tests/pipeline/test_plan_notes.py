"""What a plan says of time and of engines before it starts."""

import pytest

from pipeline.errors import RecipeError
from pipeline.model.engines import engines_of, engines_sentence
from pipeline.model.form import V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE
from pipeline.model.layout import Layout
from pipeline.quant.speed import cpu_seconds, speeds
from pipeline.quant.types import TYPES
from pipeline.report.launch import launch_lines
from pipeline.report.tables import render_text
from pipeline.report.time_table import time_table, type_times
from tasks.job import Job
from tasks.request import JobParameters
from tests.pipeline.released_plans import released_plan


def never(_):
    return False


def test_time_is_weights_over_speed_and_repacks_take_none():
    plan = released_plan("lowbit-q2_k", plan_layout("lowbit-q2_k"))
    times = {time.type.name: time for time in type_times([plan], never)}
    n_gate_and_up = 2 * 40 * 384 * 2304 * 5120
    assert times["Q2_K"].n_weights == n_gate_and_up
    assert times["Q2_K"].seconds == pytest.approx(n_gate_and_up / speeds().of["Q2_K"].plain)
    native = {
        t.type.name for t in type_times([released_plan("native", plan_layout("native"))], never)
    }
    assert "MXFP4" not in native
    assert "Q8_0" in native


def plan_layout(recipe):
    return Layout.FORK if recipe.startswith(("bpw-3.0", "served")) else Layout.MAINLINE


def test_importance_makes_some_types_slower_and_is_counted_apart():
    plan = released_plan("lowbit-q2_k", plan_layout("lowbit-q2_k"))
    plain, weighted = (type_times([plan], is_weighted) for is_weighted in (never, lambda _: True))
    assert sum(t.seconds for t in weighted) > sum(t.seconds for t in plain)
    assert {t.type.name for t in weighted if not t.is_weighted} <= {"F32", "Q8_0", "BF16"}


def test_days_and_bad_bargains_are_told_before_they_start():
    kt = TYPES["IQ3_KT"]
    seconds = cpu_seconds(kt, 5 * 10**11, weighted=False)
    assert seconds > 2 * 2 * 86_400
    plan = released_plan("lowbit-q2_k", plan_layout("lowbit-q2_k"))
    (slow, *_) = type_times([plan], never)
    times = [
        type(slow)(kt, False, 5 * 10**11, seconds),
        type(slow)(TYPES["IQ3_S"], False, 10, 1.0),
    ]
    text = " ".join(render_text(time_table(times, n_threads=2)).split())
    assert "IQ3_KT alone would run for" in text
    assert "days: think of another type, or of more threads." in text
    assert "IQ3_S without an importance matrix loses to Q3_K" in text
    assert "days" not in render_text(time_table(times[1:], n_threads=2))


@pytest.mark.parametrize(
    ("form", "types", "told"),
    [
        (V41_MAINLINE, ["Q3_K"], "read by llama.cpp b11870 and newer"),
        (V41_FORK, ["Q3_K"], "the V4.1 branches of llama.cpp and ik_llama.cpp"),
        (V41_FORK, ["Q3_K", "IQ3_KS"], "read by ik_llama.cpp since pull request 2455"),
        (V41_FORK, ["NVFP4"], "read by the V4.1 branches of llama.cpp"),
        (V41_MAINLINE, ["IQ3_KS"], "read by no engine that is known: not in this form with IQ3_KS"),
        (V4_TARGET, ["IQ2_KL"], "no engine"),
        (V41_DRAFT, ["MXFP4"], "a draft, loaded beside the target"),
    ],
)
def test_engines_are_named_by_form_and_types(form, types, told):
    assert told in engines_sentence(form, [TYPES[name] for name in types])


def test_only_engines_that_read_the_types_get_a_launch_line():
    plan = released_plan("bpw-3.0", plan_layout("bpw-3.0"))
    assert [line.engine for line in launch_lines([plan])] == [
        "ik_llama.cpp since pull request 2455"
    ]
    assert not engines_of(V41_MAINLINE, {tensor.type for tensor in plan.tensors})


def test_types_of_ik_in_the_mainline_layout_are_refused(small_miniature, tmp_path):
    recipe = tmp_path / "lost.toml"
    recipe.write_text('extends = "native"\n[sub_roles]\nrouted_down = "IQ3_KS"\n')
    parameters = JobParameters(str(small_miniature), str(recipe), str(tmp_path / "out"))
    with pytest.raises(RecipeError, match="no engine reads its types in the mainline layout"):
        Job(parameters).plans  # noqa: B018
