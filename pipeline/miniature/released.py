"""The released description files, byte for byte: config.json of both models, tokenizer_config.json.

The bytes are kept as data beside this module. Their sha256 are those of the published repositories
(deepseek-ai/DeepSeek-V4.1-Flash and deepseek-ai/DeepSeek-V4-Flash-0731).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from pipeline.errors import ConfigError
from pipeline.files import read_bytes

JsonObject = dict[str, object]

CONFIG_FILES = {
    "v4.1-flash": "deepseek-v4.1-flash.config.json",
    "v4-flash-0731": "deepseek-v4-flash-0731.config.json",
}
"""Release -> the file that holds its config.json."""


def config_bytes(release: str) -> bytes:
    """config.json of ``release`` as it was published.

    Raises:
        ConfigError: No release of this name is known.
    """
    if release not in CONFIG_FILES:
        raise ConfigError(
            "no such release is known", expected=" or ".join(CONFIG_FILES), found=release
        )
    return read_bytes(Path(__file__).with_name(CONFIG_FILES[release]))


def config_of(release: str) -> JsonObject:
    """config.json of ``release``, parsed, in the published order of its keys."""
    return cast("JsonObject", json.loads(config_bytes(release)))


def tokenizer_config_bytes() -> bytes:
    """tokenizer_config.json, the same file in both releases."""
    return read_bytes(Path(__file__).with_name("tokenizer_config.json"))


def dump_config(config: JsonObject) -> bytes:
    """A config.json in the form of the V4.1 release: two blanks a level, one final newline."""
    return (json.dumps(config, indent=2) + "\n").encode()
