"""An observation at work: planned for this machine, run, written. Imports torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline import files
from pipeline.errors import ConfigError, SourceError
from pipeline.observe.arithmetic import Arithmetic, Precision
from pipeline.observe.disk_state import DiskState
from pipeline.observe.likelihood import log_likelihood
from pipeline.observe.measure import measure
from pipeline.observe.memory_state import MemoryState
from pipeline.observe.needs import Sizes
from pipeline.observe.plan import Keeping, ObservationPlan, Room, plan_observation
from pipeline.observe.records import LayerRecord, Records
from pipeline.observe.result import write_result
from pipeline.observe.run import ObserveEvents, observe
from pipeline.observe.state import State, file_names
from pipeline.observe.text import Text
from pipeline.observe.weights import WeightLoader
from pipeline.report.observe_table import duration, observation_tables
from pipeline.report.tables import Table
from pipeline.source.reader import SourceReader
from tasks.observe.job import ObserveJob

_MOST_NATS = 700
"""More is beyond what a float can hold as a perplexity."""

_SPARE_NBYTES = 1 << 30
"""Device memory that is left alone: its libraries take some that no plan counts."""


class Observation:
    """One observation in this process.

    Args:
        job: What is observed.
        reader: Of its checkpoint, open.
        keeping: ``memory`` or ``disk``.
        host_nbytes: Memory of the host that may be used.
        n_threads: Threads that multiply.

    Raises:
        ConfigError: There is no such device.
        OutputError: Memory or disk do not suffice.
    """

    def __init__(
        self, job: ObserveJob, reader: SourceReader, keeping: str, host_nbytes: int, n_threads: int
    ) -> None:
        torch.set_num_threads(n_threads)
        self._job = job
        device = job.parameters.device
        require_device(device)
        self._arithmetic = Arithmetic.of(device, Precision(job.parameters.precision))
        specs = {spec.name: spec for spec in job.source.specs}
        self._sizes = Sizes.of(job.config, specs)
        self._loader = WeightLoader(job.checkpoint, reader, job.config, specs, self._arithmetic)
        self._room = room_of(job, self._arithmetic, host_nbytes)
        lengths = job.sequences.lengths
        self.plan: ObservationPlan = plan_observation(
            job.config, specs, lengths, self._arithmetic, Keeping(keeping), self._room
        )

    @property
    def experts_nbytes(self) -> int:
        """Bytes of routed experts that are read, all passes together."""
        config = self._job.config
        n_experts = config.n_layers * config.n_experts * len(self.plan.chunks)
        return n_experts * self._sizes.expert_nbytes

    def tables(self) -> tuple[Table, ...]:
        """The plan, with what this machine's speed makes of it."""
        job = self._job
        speed = measure(self._loader, job.config, self._arithmetic, self.plan.n_ahead)
        asked = job.parameters.tokens
        return observation_tables(self.plan, job.sequences, asked, speed, self._room, job.config)

    def run(self, advanced: Callable[[int], None]) -> None:
        """Observe and write the saliency file; ``advanced`` is told bytes of experts."""
        job, config = self._job, self._job.config
        text = Text(job.sequences, job.source.token_map, config)
        records, done = None, list[LayerRecord]()
        if self.plan.keeping is Keeping.DISK:
            files.make_folder(job.folder)
            records = Records(job.folder, job.spec)
            done = records.load(config.n_layers)
        state = self._state(done)
        advanced(self.experts_nbytes // config.n_layers * len(done))
        if done:
            say(f"{len(done)} of {config.n_layers} layers are done already")
        halves = observe(
            text,
            self._loader,
            self.plan,
            self._arithmetic,
            state,
            records=records,
            done=done,
            events=ObserveEvents(
                expert_done=lambda _layer, _expert: advanced(self._sizes.expert_nbytes),
                layer_done=lambda layer, seconds: say(f"layer {layer}: {duration(seconds)}"),
            ),
        )
        likelihood = log_likelihood(text, state, self._loader, config, self._arithmetic)
        require_likely(likelihood)
        say(f"perplexity of the text's beginning: {math.exp(-likelihood):,.2f}")
        name = f"{Path(job.parameters.calibration).name}, {job.sequences.n_tokens:,} tokens"
        write_result(job.out, halves, job.sequences, name, job.provenance(likelihood))

    def _state(self, done: list[LayerRecord]) -> State:
        if self.plan.keeping is Keeping.MEMORY:
            is_there = self.plan.state_on_device
            return MemoryState(self._arithmetic.device if is_there else torch.device("cpu"))
        config = self._job.config
        needed = file_names(config, len(done) - 1) if done else frozenset()
        found = {n: d for record in done for n, d in record.state.items() if n in needed}
        return DiskState(
            self._job.folder,
            config,
            self._job.sequences.lengths,
            self._arithmetic.values,
            n_done=len(done),
            found=found,
        )


def require_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        ConfigError: It has not.
    """
    kind, _, number = device.partition(":")
    n_gpus = torch.cuda.device_count()
    is_gpu = kind == "cuda" and (not number or (number.isdecimal() and int(number) < n_gpus))
    if device != "cpu" and not (is_gpu and n_gpus):
        raise ConfigError(
            "there is no such device",
            expected=f"cpu, or one of {n_gpus} GPUs as cuda:N",
            found=device,
            next_step="A GPU needs a build of torch for it." if kind == "cuda" else None,
        )


def require_likely(likelihood: float) -> None:
    """Refuse sums of a pass that ended in no number.

    Raises:
        SourceError: It did.
    """
    if not math.isfinite(likelihood) or likelihood < -_MOST_NATS:
        raise SourceError(
            "the forward pass gives the calibration text no probability",
            expected="a mean log likelihood of a few nats below 0",
            found=likelihood,
            next_step="Check the shards against the release's digests.",
        )


def room_of(job: ObserveJob, arithmetic: Arithmetic, host_nbytes: int) -> Room:
    """What may be taken of memory and disk; an earlier run's state is no loss."""
    device = None
    if not arithmetic.is_cpu:
        device = max(0, torch.cuda.mem_get_info(arithmetic.device)[0] - _SPARE_NBYTES)
    own = job.folder.iterdir() if job.folder.is_dir() else ()
    disk = files.free_nbytes(job.folder) + sum(map(files.allocated_nbytes, own))
    return Room(host_nbytes, device, disk)


def say(sentence: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()
