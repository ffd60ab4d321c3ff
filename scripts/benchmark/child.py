"""Take one measurement in this process and print its numbers as JSON; `scripts/bench` calls it."""

from __future__ import annotations

import argparse
import json
import sys

from benchmark.fills import measure_copy, measure_fill
from benchmark.kernels import measure_kernel, measure_rates, measure_type
from benchmark.meter import Numbers
from pipeline.errors import QuantmillError
from pipeline.quant.types import find_type
from tasks.job import Job
from tasks.request import JobParameters


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fill", "copy", "kernel", "rates", "type"])
    parser.add_argument("--source", default="")
    parser.add_argument("--recipe", default="native")
    parser.add_argument("--out", default="out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kind", help="only shards of this kind (default: all)")
    parser.add_argument("--type", default="Q3_K")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> Numbers:
    if args.what == "rates":
        return measure_rates()
    job = Job(JobParameters(source=args.source, recipe=args.recipe, out=args.out, name="bench"))
    shards = [shard for shard in job.shards if args.kind in (None, shard.kind)]
    if args.what == "type":
        return measure_type(job, shards, find_type(args.type))
    measures = {"fill": measure_fill, "copy": measure_copy, "kernel": measure_kernel}
    return measures[args.what](job, shards, args.threads)


def main() -> int:
    try:
        numbers = measure(arguments())
    except QuantmillError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    json.dump(numbers, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
