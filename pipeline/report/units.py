"""One way to write a quantity, for every table, page and chart."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
"""What makers of drives and model pages call a gigabyte."""
GIB = 2**30
"""What memory is sold in and what llama.cpp prints as 1024 MiB."""

UNITS_NOTE = f"GB = {GB:,} bytes, GiB = {GIB:,} bytes."


@dataclass(frozen=True, slots=True)
class Scale:
    """A decimal unit and the binary one next to it."""

    name: str
    nbytes: int
    binary_name: str
    binary_nbytes: int

    def decimal(self, nbytes: int, decimals: int = 3) -> str:
        """``nbytes`` in the decimal unit, without it."""
        return _scaled(nbytes / self.nbytes, decimals)

    def binary(self, nbytes: int, decimals: int = 3) -> str:
        """``nbytes`` in the binary unit, without it."""
        return _scaled(nbytes / self.binary_nbytes, decimals)


GIGA = Scale("GB", GB, "GiB", GIB)
_SMALLER = (GIGA, Scale("MB", 10**6, "MiB", 2**20), Scale("kB", 10**3, "KiB", 2**10))


def scale_for(nbytes: int) -> Scale:
    """The largest unit of which ``nbytes`` is at least one; small test models need it."""
    return next((scale for scale in _SMALLER if nbytes >= scale.nbytes), _SMALLER[-1])


def count(number: int) -> str:
    """An exact whole number, in groups of three digits."""
    return f"{number:,}"


def change(number: int) -> str:
    """An exact difference, with its sign; no difference is ``0``."""
    return f"{number:+,}" if number else "0"


def gigabytes(nbytes: int) -> str:
    """``nbytes`` in GB, three decimals, without the unit."""
    return GIGA.decimal(nbytes)


def gibibytes(nbytes: int) -> str:
    """``nbytes`` in GiB, three decimals, without the unit."""
    return GIGA.binary(nbytes)


def gigabytes_change(nbytes: int) -> str:
    """A difference in GB, three decimals, with its sign, without the unit."""
    text = gigabytes(abs(nbytes))
    return f"{'-' if nbytes < 0 else '+'}{text}" if nbytes else text


def both(nbytes: int) -> str:
    """``nbytes`` in GB and in GiB, each with its unit."""
    return f"{gigabytes(nbytes)} GB ({gibibytes(nbytes)} GiB)"


def share(part: float) -> str:
    """A fraction of one as per cent, one decimal."""
    return f"{_scaled(part * 100, 1)} %"


def bits(bits_per_weight: float) -> str:
    """Bits per weight, three decimals."""
    return f"{bits_per_weight:.3f}"


def _scaled(value: float, decimals: int) -> str:
    """A value that is not zero never reads as one."""
    smallest = 10**-decimals
    return f"<{smallest:.{decimals}f}" if 0 < value < smallest / 2 else f"{value:,.{decimals}f}"
