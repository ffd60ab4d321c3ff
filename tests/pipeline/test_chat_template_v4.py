"""The V4-Flash-0731 chat template against the released encoding's own vectors and its ports.

Digests are those of encoding/tests/test_output_1.txt and the text of test_output_2.txt in the
released repository, as ports of the encoding quote them; what the efforts add is what 0731's
encoding_dsv4.py and llama.cpp's deepseek-ai-DeepSeek-V4-Flash-0731.jinja agree on.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jinja2
import pytest

from pipeline.digest import sha256
from tests.pipeline import conversations
from tests.pipeline.conversations import BOS, EOS, SYSTEM, USER, WEATHER, assistant, call

render = partial(conversations.render, "v4")

HELPFUL = {"role": "system", "content": "You are a helpful assistant."}


def described(kind: str, description: str, **more: object) -> dict[str, object]:
    return {"type": kind, **more, "description": description}


def tool(name: str, description: str, properties: object, required: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": [required]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


RELEASED_TOOLS = [
    tool(
        "get_weather",
        "Get the weather for a specific location",
        {
            "location": described("string", "The city name"),
            "unit": described("string", "Temperature unit", enum=["celsius", "fahrenheit"]),
        },
        "location",
    ),
    tool(
        "search",
        "Search the web for information",
        {
            "query": described("string", "Search query"),
            "num_results": described("integer", "Number of results to return"),
        },
        "query",
    ),
]


def test_the_first_released_vector_thinking_with_tools() -> None:
    messages = [
        HELPFUL,
        {"role": "user", "content": "What's the weather in Beijing?"},
        assistant(
            "",
            reasoning_content="The user wants to know the weather in Beijing. "
            "I should use the get_weather tool.",
            tool_calls=[call("get_weather", {"location": "Beijing", "unit": "celsius"})],
        ),
        {"role": "tool", "content": '{"temperature": 22, "condition": "sunny", "humidity": 45}'},
        assistant(
            "The weather in Beijing is currently sunny "
            "with a temperature of 22°C and 45% humidity.",
            reasoning_content="Got the weather data. Let me format a nice response.",
        ),
    ]
    rendered = render(messages, tools=RELEASED_TOOLS, add_generation_prompt=False)
    published = "9b366d9d2eac842a6e890594aac0b58648e5623717202b33497afadf03e26540"
    assert sha256(rendered.encode()) == published


def test_the_second_released_vector_earlier_reasoning_goes() -> None:
    messages = [
        HELPFUL,
        {"role": "user", "content": "Hello"},
        assistant(
            "Hi there! How can I help you?",
            reasoning_content="The user said hello, I should greet back.",
        ),
        {"role": "user", "content": "What is the capital of France?"},
        assistant(
            "The capital of France is Paris.",
            reasoning_content="The user asks about the capital of France. It is Paris.",
        ),
    ]
    assert render(messages, add_generation_prompt=False) == (
        f"{BOS}You are a helpful assistant."
        f"<｜User｜>Hello<｜Assistant｜></think>Hi there! How can I help you?{EOS}"
        "<｜User｜>What is the capital of France?<｜Assistant｜><think>"
        "The user asks about the capital of France. It is Paris.</think>"
        f"The capital of France is Paris.{EOS}"
    )


@pytest.mark.parametrize(
    ("messages", "variables", "expected"),
    [
        pytest.param(
            [SYSTEM, USER],
            {"thinking": False},
            "S<｜User｜>U<｜Assistant｜></think>",
            id="system, no thinking",
        ),
        pytest.param(
            [SYSTEM, USER], {}, "S<｜User｜>U<｜Assistant｜><think>", id="system, thinking"
        ),
        pytest.param(
            [USER], {"enable_thinking": False}, "<｜User｜>U<｜Assistant｜></think>", id="user only"
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
            [SYSTEM, {"role": "developer", "content": "D"}, assistant(), USER],
            {"thinking": False},
            f"S<｜User｜>D<｜Assistant｜></think>A{EOS}<｜User｜>U<｜Assistant｜></think>",
            id="developer turns are user turns",
        ),
        pytest.param(
            [USER, assistant(), {"role": "system", "content": "T"}],
            {"thinking": False},
            f"<｜User｜>U<｜Assistant｜></think>A{EOS}T<｜Assistant｜></think>",
            id="a later system turn is answered",
        ),
        pytest.param(
            [USER, assistant(reasoning_content="R"), USER],
            {"drop_thinking": False, "add_generation_prompt": False},
            f"<｜User｜>U<｜Assistant｜><think>R</think>A{EOS}<｜User｜>U",
            id="earlier reasoning is kept on demand",
        ),
        pytest.param(
            [USER, assistant(reasoning_content="R")],
            {"thinking": False, "add_generation_prompt": False},
            f"<｜User｜>U<｜Assistant｜></think>A{EOS}",
            id="reasoning goes without thinking",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            {"thinking": False},
            "<｜User｜>a\n\nb<｜Assistant｜></think>",
            id="parts",
        ),
    ],
)
def test_renders_the_released_format(
    messages: list[Any], variables: dict[str, Any], expected: str
) -> None:
    assert render(messages, **variables) == BOS + expected


@pytest.mark.parametrize(
    ("effort", "begins", "ends"),
    [
        pytest.param(None, "", "", id="none"),
        pytest.param("low", "", "", id="low"),
        pytest.param(
            "high",
            "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very",
            "to ensure absolutely no assumption is left unchecked.\n\n",
            id="high",
        ),
        pytest.param(
            "max",
            "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n",
            "no assumption remains unchecked and no error remains undiscovered.\n\n",
            id="max",
        ),
    ],
)
def test_effort_is_a_text_before_everything(effort: str | None, begins: str, ends: str) -> None:
    added = render([SYSTEM, USER], reasoning_effort=effort).removesuffix(
        "S<｜User｜>U<｜Assistant｜><think>"
    )
    assert added.startswith(BOS + begins)
    assert added.endswith(ends)
    assert (added == BOS) == (not begins)
    without_thinking = render([USER], thinking=False, reasoning_effort=effort)
    assert without_thinking == f"{BOS}<｜User｜>U<｜Assistant｜></think>"


def test_tools_without_a_system_text() -> None:
    rendered = render([USER], thinking=False, tools=[WEATHER])
    schema = json.dumps(WEATHER["function"])
    assert rendered.startswith(f"{BOS}\n\n## Tools\n\n")
    assert rendered.endswith(
        f"### Available Tool Schemas\n\n{schema}\n\nYou MUST strictly follow the above defined "
        "tool name and parameter schemas to invoke tool calls.\n"
        "<｜User｜>U<｜Assistant｜></think>"
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
    assert render(messages, tools=[WEATHER]).endswith(
        "<｜User｜>U<｜Assistant｜><think>R</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">é\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">[1, "é"]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{EOS}"
        "<｜User｜><tool_result>one</tool_result>\n\n<tool_result>two</tool_result>"
        "<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        pytest.param([{"role": "critic", "content": ""}], {}, "no role critic", id="role"),
        pytest.param([USER], {"reasoning_effort": "medium"}, "reasoning_effort", id="effort"),
        pytest.param([USER], {"reasoning_effort": 75}, "reasoning_effort", id="effort number"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image"}]}], {}, "type image", id="content"
        ),
        pytest.param(
            [USER, assistant(tool_calls=[call("f", "{}")])], {}, "as an object", id="arguments"
        ),
        pytest.param([USER], {"tools": [{"type": "web"}]}, "type function", id="tool type"),
    ],
)
def test_refuses_what_the_format_cannot_say(
    messages: list[Any], variables: dict[str, Any], message: str
) -> None:
    with pytest.raises(jinja2.TemplateError, match=message):
        render(messages, **variables)
