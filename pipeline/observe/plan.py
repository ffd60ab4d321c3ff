"""What an observation takes, told before it begins, and refused where it cannot be had.

Memory, in bytes (`pipeline.observe.needs` has the sizes; v is 4, the size of a value):

    device  the largest layer without its routed experts             v * weights
    device  one routed expert                                        v * weights
    device  the longest sequence, on its way through the attention   `needs.sequence_nbytes`
    device  a block of its tokens                                    `needs.token_scratch_nbytes` each
    device  a batch of tokens in an expert                           `needs.batch_nbytes`
    device  a chunk of tokens before and after the experts           `needs.chunk_token_nbytes` each
    host    experts decoded ahead                                    4 * weights each
    either  the state, where it is kept in memory                    `needs.state_nbytes`
    host    streams on their way to the disk, else                   `needs.streams_nbytes` each

On a CPU the device is the host. The chunk gets what is left of the room: every chunk decodes every
expert anew. The same sizes are what the tests hold a run's memory against.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.errors import OutputError
from pipeline.model.config import ModelConfig
from pipeline.observe import needs
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.chunk import chunks_of
from pipeline.observe.disk_state import N_WRITING
from pipeline.observe.needs import Sizes
from pipeline.source.spec import TensorSpec

BASE_NBYTES = 600_000_000
"""What torch takes before anything is read: code and caches on the host, the context of a GPU."""

LEAST_BLOCK = 16
"""Tokens of a block, even where their scratch then is more than what was asked for."""

_F32_NBYTES = 4
_CPU_AHEAD, _GPU_AHEAD = 1, 6


class Keeping(StrEnum):
    """Where the state between layers is kept."""

    MEMORY = "memory"
    """On the device where it fits, else on the host; a killed run begins anew."""
    DISK = "disk"
    """In files; a killed run goes on with the layer where it stopped."""


@dataclass(frozen=True, slots=True)
class Use:
    """Memory that something takes, on the device or on the host."""

    what: str
    nbytes: int
    on_device: bool


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that may be taken of the host's memory, of the device's and of the disk.

    ``device`` is None where the device is the host.
    """

    host: int
    device: int | None
    disk: int

    def left(self, uses: Iterable[Use], *, on_device: bool) -> int:
        """What ``uses`` leave of one of the two memories; negative where they are too much."""
        if self.device is None:
            return self.host - sum(use.nbytes for use in uses)
        whole = self.device if on_device else self.host
        return whole - sum(use.nbytes for use in uses if use.on_device == on_device)


@dataclass(frozen=True, slots=True)
class ObservationPlan:
    """How an observation runs, and what it takes at most.

    ``chunks``: numbers of the sequences that go through a layer's experts together. ``block``:
    tokens of a sequence that are worked on at a time. ``n_ahead``: experts decoded ahead.
    ``state_on_device``: the state is kept in the device's memory.
    """

    chunks: tuple[range, ...]
    block: int
    n_ahead: int
    keeping: Keeping
    state_on_device: bool
    n_tokens: int
    uses: tuple[Use, ...]
    disk_nbytes: int
    read_nbytes: int
    flops: int

    @property
    def n_sequences(self) -> int:
        """Sequences of the text."""
        return self.chunks[-1].stop


def plan_observation(
    config: ModelConfig,
    specs: Mapping[str, TensorSpec],
    lengths: Sequence[int],
    arithmetic: Arithmetic,
    keeping: Keeping,
    room: Room,
) -> ObservationPlan:
    """The plan that decodes experts least often within ``room``.

    Args:
        config: The model.
        specs: Its stored tensors by name.
        lengths: Tokens of every sequence.
        arithmetic: Types and device.
        keeping: Where the state goes.
        room: What may be taken.

    Raises:
        OutputError: Memory does not hold the work on one sequence, or the disk not the state.
    """
    sizes = Sizes.of(config, specs)
    n_ahead = _CPU_AHEAD if arithmetic.is_cpu else _GPU_AHEAD
    token_nbytes = needs.chunk_token_nbytes(config, arithmetic)
    block = _block(config, max(lengths), arithmetic)
    uses = _fixed_uses(config, sizes, lengths, arithmetic, block, n_ahead)
    least = Use("the shortest chunk", token_nbytes * max(lengths), on_device=True)
    if keeping is Keeping.MEMORY:
        uses.append(_state_use(config, lengths, arithmetic, room, [*uses, least]))
    else:
        waiting = N_WRITING * needs.streams_nbytes(config, max(lengths), arithmetic)
        uses.append(Use("state on its way to the disk", waiting, on_device=False))
    for on_device in (True, False):
        _require([*uses, least], room, on_device=on_device, keeping=keeping)
    disk = needs.disk_nbytes(config, lengths, arithmetic) if keeping is Keeping.DISK else 0
    if disk > room.disk:
        raise _too_little("disk", disk, room.disk, "Choose another --out, or --state memory")
    chunks = tuple(chunks_of(lengths, room.left(uses, on_device=True) // token_nbytes))
    largest = max(sum(lengths[n] for n in chunk) for chunk in chunks)
    chunk_use = Use(f"{largest:,} tokens at the experts", largest * token_nbytes, on_device=True)
    n_tokens = sum(lengths)
    return ObservationPlan(
        chunks=chunks,
        block=block,
        n_ahead=n_ahead,
        keeping=keeping,
        state_on_device=keeping is Keeping.MEMORY and uses[-1].on_device,
        n_tokens=n_tokens,
        uses=(*uses, chunk_use),
        disk_nbytes=disk,
        read_nbytes=needs.read_nbytes(config, sizes, n_tokens, len(chunks)),
        flops=needs.flops(config, sizes, lengths),
    )


def _block(config: ModelConfig, longest: int, arithmetic: Arithmetic) -> int:
    per_token = needs.token_scratch_nbytes(config, longest, arithmetic)
    return min(longest, max(LEAST_BLOCK, arithmetic.scratch_nbytes // per_token))


def _fixed_uses(
    config: ModelConfig,
    sizes: Sizes,
    lengths: Sequence[int],
    arithmetic: Arithmetic,
    block: int,
    n_ahead: int,
) -> list[Use]:
    """Everything but the state and the chunk."""
    longest, itemsize = max(lengths), arithmetic.values.itemsize
    sequence = needs.sequence_nbytes(config, longest, arithmetic)
    scratch = block * needs.token_scratch_nbytes(config, longest, arithmetic)
    batch = needs.batch_nbytes(config, sum(lengths), arithmetic)
    uses = [
        Use("torch itself", BASE_NBYTES, on_device=True),
        Use("the largest layer without routed experts", max(sizes.dense) * itemsize, True),
        Use("one routed expert", sizes.expert * itemsize, on_device=True),
        Use(f"a sequence of {longest:,} tokens", sequence, on_device=True),
        Use(f"a block of {block:,} tokens, or an expert's batch", max(scratch, batch), True),
        Use("experts decoded ahead", (n_ahead + 1) * sizes.expert * _F32_NBYTES, on_device=False),
    ]
    if not arithmetic.is_cpu:
        passing = max(sizes.dense) * _F32_NBYTES + sequence
        uses += [
            Use("torch on the host", BASE_NBYTES, on_device=False),
            Use("weights and streams on their way to the device", passing, on_device=False),
        ]
    return uses


def _state_use(
    config: ModelConfig,
    lengths: Sequence[int],
    arithmetic: Arithmetic,
    room: Room,
    others: Sequence[Use],
) -> Use:
    nbytes = needs.state_nbytes(config, lengths, arithmetic)
    fits = room.device is not None and nbytes <= room.left(others, on_device=True)
    return Use("the state between layers", nbytes, on_device=fits)


def _require(uses: Sequence[Use], room: Room, *, on_device: bool, keeping: Keeping) -> None:
    left = room.left(uses, on_device=on_device)
    if left < 0:
        on_host = room.device is None or not on_device
        whole = room.host if on_host or room.device is None else room.device
        step = "Choose a shorter --sequence"
        if on_host and keeping is Keeping.MEMORY:
            step += ", fewer --tokens or --state disk"
        raise _too_little(
            "memory" if on_host else "memory of the device", whole - left, whole, step
        )


def _too_little(what: str, needed: int, there: int, step: str) -> OutputError:
    return OutputError(
        f"the observation does not fit: too little {what}",
        expected=f"{needed:,} bytes ({needed / 1e9:.3f} GB)",
        found=f"{there:,} bytes ({there / 1e9:.3f} GB)",
        next_step=f"{step}.",
    )
