"""The two forms of a `deepseek41` GGUF that engines read; they differ only in the engram part."""

from __future__ import annotations

from enum import StrEnum


class Layout(StrEnum):
    """Which loader a V4.1 target file is written for."""

    MAINLINE = "mainline"
    """ggml-org/llama.cpp since its deepseek41 support: one table of both layers, ``ple.*`` keys."""
    FORK = "fork"
    """ik_llama.cpp and the V4.1 branches: a table per layer, nine ``engram.*`` keys."""
