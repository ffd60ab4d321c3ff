"""Typed access to the objects of config.json; every miss names the key by its full path."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from pipeline.errors import ConfigError

T = TypeVar("T")


class ConfigKeys:
    """Typed access to one JSON object; every miss names the key by its full path."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key, checked to be of a kind; ints pass for floats."""
        value = self._values.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None and key not in self._values:
            raise ConfigError(
                f"config.json lacks the key {self._path}{key}",
                expected=kind.__name__,
                next_step="Use the config.json that was released with these shards.",
            )
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"config.json key {self._path}{key} has the wrong kind of value",
                expected=kind.__name__,
                found=repr(value),
            )
        return value

    def count(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A count from 1 to ``most``."""
        value = self.get(key, int, default)
        if not 1 <= value <= most:
            raise ConfigError(
                f"config.json key {self._path}{key} is no possible count",
                expected=f"1 to {most:,}",
                found=value,
            )
        return value

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.get(key, float)
        if not 0 < value < math.inf:
            raise ConfigError(
                f"config.json key {self._path}{key} must be a positive number", found=value
            )
        return value

    def fixed(self, key: str, expected: object) -> None:
        """Refuse any value but the one this project stands for; an absent key passes."""
        value = self._values.get(key, expected)
        if value != expected:
            raise ConfigError(
                f"config.json key {self._path}{key} has a value this project cannot convert",
                expected=repr(expected),
                found=repr(value),
                next_step="Its weights would be read wrong without a word.",
            )

    def ints(self, key: str) -> tuple[int, ...]:
        """A list of counts."""
        values = self.get(key, list)
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise ConfigError(
                f"config.json key {self._path}{key} must be a list of counts", found=repr(values)
            )
        return tuple(values)

    def inner(self, key: str) -> ConfigKeys:
        """A nested object."""
        return ConfigKeys(self.get(key, dict), f"{self._path}{key}.")

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None
