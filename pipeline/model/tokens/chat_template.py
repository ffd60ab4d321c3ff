"""The chat template written into V4.1 files (the checkpoint ships code instead of a template)."""

from __future__ import annotations

from pathlib import Path

from pipeline.files import read_bytes

_TEMPLATE = "deepseek-v4.1.jinja"


def chat_template() -> str:
    """Jinja text that renders a conversation as the checkpoint's encoding/encoding.py does.

    Variables: ``messages`` (roles system, user, assistant, tool), ``tools``, ``bos_token``,
    ``eos_token``, ``add_generation_prompt``; ``thinking`` or ``enable_thinking`` (default on);
    ``reasoning_effort``: low, high, max or 1 … 100 (default high = 75). Reasoning of earlier turns
    is left out unless there are tools or ``drop_thinking`` is false. What the format has no form
    for is refused with ``raise_exception``.
    """
    return read_bytes(Path(__file__).with_name(_TEMPLATE)).decode()
