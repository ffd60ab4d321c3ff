"""The chat template written into a file: both checkpoints ship code instead of a template."""

from __future__ import annotations

from pathlib import Path

from pipeline.files import read_bytes

_TEMPLATES = {"v4.1": "deepseek-v4.1.jinja", "v4": "deepseek-v4.jinja"}


def chat_template(family: str) -> str:
    """Jinja text that renders a conversation as the checkpoint's encoding/ folder does.

    Variables: ``messages`` (roles system, user, assistant, tool; in V4 also developer),
    ``tools``, ``bos_token``, ``eos_token``, ``add_generation_prompt``; ``thinking`` or
    ``enable_thinking`` (default on); ``reasoning_effort``: low, high or max, and in V4.1 also
    1 … 100 (default high = 75 in V4.1, low in V4). Reasoning of earlier turns is left out unless
    there are tools or ``drop_thinking`` is false. What the format has no form for is refused with
    ``raise_exception``.

    Args:
        family: The model family, as in `pipeline.model.config.ModelConfig`.
    """
    return read_bytes(Path(__file__).with_name(_TEMPLATES[family])).decode()
