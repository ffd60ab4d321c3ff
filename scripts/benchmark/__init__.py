"""The measurements of `scripts/bench`: generate, run, hold against goals, tabulate."""
