"""The V4.1 chat template against renderings of the released encoding and its public ports."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jinja2
import pytest

from tests.pipeline import conversations
from tests.pipeline.conversations import BOS, EOS, SYSTEM, USER, WEATHER, assistant, call

render = partial(conversations.render, "v4.1")


def effort(budget: int) -> str:
    return (
        f"Reasoning Effort: {budget} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


@pytest.mark.parametrize(
    ("messages", "variables", "expected"),
    [
        pytest.param(
            [SYSTEM, USER],
            {"thinking": False},
            "<｜System｜>S<｜User｜>U<｜Assistant｜></think>",
            id="system, no thinking",
        ),
        pytest.param(
            [SYSTEM, USER],
            {},
            f"<｜System｜>{effort(75)}S<｜User｜>U<｜Assistant｜><think>",
            id="system, thinking",
        ),
        pytest.param(
            [USER],
            {"enable_thinking": False},
            "<｜User｜>U<｜Assistant｜></think>",
            id="user only, no thinking",
        ),
        pytest.param(
            [USER],
            {"enable_thinking": True},
            f"<｜System｜>{effort(75)}<｜User｜>U<｜Assistant｜><think>",
            id="user only, thinking",
        ),
        pytest.param(
            [USER],
            {"thinking": False, "add_generation_prompt": False},
            "<｜User｜>U",
            id="no generation prompt",
        ),
        pytest.param(
            [USER, {"role": "user", "content": "V"}],
            {"thinking": False},
            "<｜User｜>U\n\nV<｜Assistant｜></think>",
            id="user turns in a row are one turn",
        ),
        pytest.param(
            [USER, assistant(), {"role": "user", "content": "V"}],
            {"thinking": False},
            f"<｜User｜>U<｜Assistant｜></think>A{EOS}<｜User｜>V<｜Assistant｜></think>",
            id="many turns",
        ),
        pytest.param(
            [USER, assistant(reasoning_content="R")],
            {"add_generation_prompt": False},
            f"<｜System｜>{effort(75)}<｜User｜>U<｜Assistant｜><think>R</think>A{EOS}",
            id="reasoning of the last answer stays",
        ),
        pytest.param(
            [SYSTEM, USER, assistant(reasoning_content="R"), {"role": "system", "content": "T"}],
            {"reasoning_effort": 88},
            f"<｜System｜>{effort(88)}S<｜User｜>U<｜Assistant｜></think>A{EOS}"
            "<｜System｜>T<｜Assistant｜><think>",
            id="a later system turn is answered, earlier reasoning goes",
        ),
        pytest.param(
            [USER, assistant(reasoning_content="R"), USER],
            {"drop_thinking": False, "add_generation_prompt": False},
            f"<｜System｜>{effort(75)}<｜User｜>U<｜Assistant｜><think>R</think>A{EOS}<｜User｜>U",
            id="earlier reasoning is kept on demand",
        ),
        pytest.param(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "x"}},
                        {"type": "text", "text": "what?"},
                    ],
                }
            ],
            {"thinking": False},
            "<｜User｜><｜deepseek_image｜>\n\nwhat?<｜Assistant｜></think>",
            id="image",
        ),
    ],
)
def test_renders_the_released_format(
    messages: list[Any], variables: dict[str, Any], expected: str
) -> None:
    assert render(messages, **variables) == BOS + expected


@pytest.mark.parametrize(
    ("reasoning_effort", "budget"), [("low", 50), ("high", 75), ("max", 100), (1, 1), (None, 75)]
)
def test_effort_is_a_number_in_the_prompt(reasoning_effort: object, budget: int) -> None:
    rendered = render([USER], reasoning_effort=reasoning_effort)
    assert rendered.startswith(f"{BOS}<｜System｜>{effort(budget)}<｜User｜>")


def test_tools_stand_after_the_system_text() -> None:
    rendered = render([SYSTEM, USER], thinking=False, tools=[WEATHER])
    schema = json.dumps(WEATHER["function"])
    assert rendered.startswith(
        f"{BOS}<｜System｜>S\n\n## Tools\n\nYou have access to a set of tools to help answer the "
        'user\'s question. You can invoke tools by writing a "<｜DSML｜ calls>" block like the '
        'following:\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="$TOOL_NAME">\n'
    )
    assert rendered.endswith(
        "\n\nOtherwise, output directly after </think> with tool calls or final response.\n\n"
        f"### Available Tool Schemas\n\n{schema}\n\nYou MUST strictly follow the above defined "
        "tool name and parameter schemas to invoke tool calls.\n"
        "<｜User｜>U<｜Assistant｜></think>"
    )


def test_tools_without_a_system_text() -> None:
    assert render([USER], thinking=False, tools=[WEATHER]).startswith(
        f"{BOS}<｜System｜>\n\n## Tools\n\n"
    )


def test_tool_calls_and_their_results() -> None:
    messages = [
        USER,
        assistant(
            "",
            reasoning_content="R",
            tool_calls=[call("f", {"s": "é\n", "n": [1, "é"]}), call("g", {})],
        ),
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    rendered = render(messages, tools=[WEATHER])
    assert rendered.endswith(
        "<｜User｜>U<｜Assistant｜><think>R</think>\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="s" string="true">é\n</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="n" string="false">[1, "é"]</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        '<｜DSML｜ invoke name="g">\n\n</｜DSML｜ invoke>\n'
        f"</｜DSML｜ calls>{EOS}"
        "<｜User｜><tool_result>one</tool_result>\n\n<tool_result>two</tool_result>"
        "<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        pytest.param([{"role": "developer", "content": ""}], {}, "no role developer", id="role"),
        pytest.param([USER], {"reasoning_effort": "medium"}, "reasoning_effort", id="effort name"),
        pytest.param([USER], {"reasoning_effort": 101}, "reasoning_effort", id="effort number"),
        pytest.param([USER], {"reasoning_effort": True}, "reasoning_effort", id="effort flag"),
        pytest.param(
            [{"role": "user", "content": [{"type": "audio"}]}], {}, "type audio", id="content"
        ),
        pytest.param(
            [USER, assistant(tool_calls=[call("f", "{}")])], {}, "as an object", id="arguments"
        ),
        pytest.param([USER], {"tools": [{"type": "web"}]}, "type function", id="tool type"),
        pytest.param(
            [USER], {"tools": [WEATHER | {"namespace": "n"}]}, "namespace", id="namespace"
        ),
    ],
)
def test_refuses_what_the_format_cannot_say(
    messages: list[Any], variables: dict[str, Any], message: str
) -> None:
    with pytest.raises(jinja2.TemplateError, match=message):
        render(messages, **variables)
