"""What the sizes of every miniature must obey, whichever release it is like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import ConfigError, raise_problems

MIN_VOCAB = 512
"""Holds the bytes and the named tokens of either release."""

_ROW_STEP = 256
"""Row widths are multiples of a K-quant super-block in the releases, so here too."""


def refuse_misfits(
    least: Mapping[str, tuple[int, int]], widths: Mapping[str, tuple[int, int]]
) -> None:
    """Refuse sizes that no checkpoint of these architectures can have.

    Args:
        least: Name -> value and the lowest one allowed.
        widths: Name -> row width and the number of equal parts that it is cut into.

    Raises:
        ConfigError: One size breaks a rule; several raise `Problems`.
    """
    problems = [*_too_low(least), *_uneven(widths)]
    raise_problems("the miniature's sizes do not fit", problems)


def _too_low(least: Mapping[str, tuple[int, int]]) -> Iterator[ConfigError]:
    for name, (value, low) in least.items():
        if value < low:
            yield ConfigError(f"{name} is too low", expected=f"at least {low}", found=value)


def _uneven(widths: Mapping[str, tuple[int, int]]) -> Iterator[ConfigError]:
    for name, (value, n_parts) in widths.items():
        if value < 1 or n_parts < 1 or value % (n_parts * _ROW_STEP):
            yield ConfigError(
                f"{name} must be a multiple of {n_parts * _ROW_STEP}",
                found=value,
                next_step="Rows are then whole blocks of every type, as in the release.",
            )
