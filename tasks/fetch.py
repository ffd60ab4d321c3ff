"""Fetching source files of a hub checkpoint, one task each, and letting them go again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

import luigi

from pipeline.source.hub.events import FetchEvents
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.part import forget_download
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.throttle import Throttle
from tasks.parameters import JobTask
from tasks.plan import AcceptPlan
from tasks.progress import Progress
from tasks.targets import ConditionTarget


class FetchFile(JobTask):
    """Bring one source file in, whole and with the right digest."""

    file = luigi.Parameter()

    resources: ClassVar = {"network": 1}
    """Files side by side: as many as luigi's resource of that name allows."""

    def requires(self) -> Iterator[luigi.Task]:
        """The accepted plan; with sources let go, also that the disk has room again."""
        yield AcceptPlan(spec=self.job.spec, **self.passed_on())
        for earlier in self.job.sources.let_go_before(self.file) if self.lets_go else ():
            yield ReleaseFile(file=earlier, **self.passed_on())

    def output(self) -> ConditionTarget:
        """The file is here, or nothing needs it any more."""
        sources = self.job.sources
        return ConditionTarget(lambda: sources.has(self.file) or self.job.is_used_up(self.file))

    def run(self) -> None:
        """Fetch, verify, name."""
        sources = self.job.sources
        origin, file = sources.origin(self.file), sources.hub_file(self.file)
        assert origin.snapshot is not None
        limit = Throttle(self.bandwidth / self.n_side_by_side) if self.bandwidth else None
        with Progress(f"fetch {self.file}", file.nbytes) as progress:
            fetch_file(
                HubRemote(origin.snapshot),
                file,
                origin.target(self.file),
                n_connections=self.connections,
                limit=limit,
                events=FetchEvents(advanced=progress.advance, noted=progress.note),
            )

    @property
    def n_side_by_side(self) -> int:
        """How many files luigi fetches at a time."""
        return int(luigi.configuration.get_config().getint("resources", "network", 1))


class ReleaseFile(JobTask):
    """Delete a fetched file once every block that comes from it is journaled."""

    file = luigi.Parameter()

    def requires(self) -> Iterator[luigi.Task]:
        """Every part that is filled from the file."""
        # Imported here: a part is filled from files, a file let go after parts.
        from tasks.shard import FillFrom

        for no in self.job.shards_of(self.file):
            yield FillFrom(no=no, spec=self.job.shard_specs[no], file=self.file, **self.passed_on())

    def output(self) -> ConditionTarget:
        """Nothing needs the file, and it is gone."""
        target = self.job.sources.origin(self.file).target(self.file)
        return ConditionTarget(lambda: self.job.is_used_up(self.file) and not target.exists())

    def run(self) -> None:
        """Delete; a file of the user's own hub cache stays."""
        target = self.job.sources.origin(self.file).target(self.file)
        if not target.exists():
            return
        forget_download(target)
        sys.stdout.write(f"let go: {self.file} (everything made of it is journaled)\n")
        sys.stdout.flush()
