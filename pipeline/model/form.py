"""Which loaders a GGUF is written for: its architecture, and what differs inside one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.model.layout import Layout


class Architecture(StrEnum):
    """``general.architecture`` of the files this project writes; every key begins with it."""

    DEEPSEEK41 = "deepseek41"
    """Target of V4.1-Flash, in two layouts."""
    DEEPSEEK4 = "deepseek4"
    """Target of V4-Flash-0731, in llama.cpp's one layout."""
    DFLASH = "dflash"
    """The DSpark draft of either model."""


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of file: ``layout`` counts for `deepseek41` only, the other two have one form each.

    ``family`` is the model's (``v4.1`` or ``v4``): a V4 draft mixes its residual streams through
    ``output_hc_*`` tensors, a V4.1 draft has none and says ``hyper_connection.single_pass``.
    """

    architecture: Architecture
    family: str
    layout: Layout | None = None

    @property
    def is_draft(self) -> bool:
        """Whether this is a draft file, which runs beside a target."""
        return self.architecture is Architecture.DFLASH

    def __str__(self) -> str:
        return f"{self.architecture} {self.layout}" if self.layout else str(self.architecture)


V41_MAINLINE = Form(Architecture.DEEPSEEK41, "v4.1", Layout.MAINLINE)
V41_FORK = Form(Architecture.DEEPSEEK41, "v4.1", Layout.FORK)
V4_TARGET = Form(Architecture.DEEPSEEK4, "v4")
V41_DRAFT = Form(Architecture.DFLASH, "v4.1")
V4_DRAFT = Form(Architecture.DFLASH, "v4")
