"""A recipe run whose quantizer aborts the process, as a C library does on bad input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache

import luigi

from pipeline.quant.libraries import Libraries
from recipes import RunRecipe
from tasks.job import Job
from tasks.shard import WriteShard
from tasks.together import FillTogether


class AbortingQuantizer(Libraries):
    """Dies at its first Q8_0 row."""

    def quantize(self, ggml_type, rows, out, importance):
        if ggml_type.name == "Q8_0":
            os.abort()
        super().quantize(ggml_type, rows, out, importance)


class AbortingJob(Job):
    """A job with that quantizer."""

    @cached_property
    def quantizer(self):
        return AbortingQuantizer()


@lru_cache
def open_aborting_job(parameters):
    return AbortingJob(parameters)


class AbortingShard(WriteShard):
    """A shard of that job."""

    @property
    def job(self):
        return open_aborting_job(self.job_parameters)


class AbortingRecipe(RunRecipe):
    """The main job over such shards."""

    def requires(self) -> Iterator[luigi.Task]:
        for no, spec in enumerate(self.job.shard_specs):
            yield AbortingShard(no=no, spec=spec, **self.passed_on())


class AbortingTogether(FillTogether):
    """The one pass of such jobs."""

    @property
    def jobs(self):
        return [open_aborting_job(replace(self.said, recipe=n)) for n in self.together.split(",")]

    @property
    def job(self):
        return self.jobs[0]
