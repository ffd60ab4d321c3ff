"""Every line of the table: what is computed from the numbers of a round."""

from __future__ import annotations

from collections.abc import Callable

from benchmark.goals import EQUAL, KERNEL_SHARE, MIB, Goal, Line, memory, speedup
from benchmark.meter import Numbers
from pipeline.report.units import GB

MEGA = 1e6


def cpu(n: Numbers) -> float:
    """CPU seconds of a fill, its bytes made durable, nothing read back."""
    return n["fill_cpu"] + n["sync_cpu"]


def wall(n: Numbers) -> float:
    """Seconds of a fill, its bytes made durable, nothing read back."""
    return n["fill_wall"] + n["sync_wall"]


def kernel_speed(fill: Numbers, kernel: Numbers, seconds: float, kernel_seconds: str) -> float:
    return fill["n_weights"] / seconds / (kernel["n_weights"] / kernel[kernel_seconds])


def rest(n: Numbers) -> float:
    """CPU time outside the clocked calls: hashing, journal, threads, Python."""
    return cpu(n) - n["kernel_cpu"] - n["source_cpu"] - n["write_cpu"]


def ratio(name: str, key: str, above: str, below: str, goal: Goal | None = None) -> Line:
    return Line(name, "{:.4f}", (key,), lambda n: n[above] / n[below], goal)


def fill_lines(key: str, title: str, kernel_goal: Goal | None) -> list[Line]:
    """Speed, CPU shares and bytes of one fill."""

    def share(part: str, value: Callable[[Numbers], float], goal: Goal | None = None) -> Line:
        return Line(f"{title}: CPU share of {part}", "{:.1%}", (key,), value, goal)

    in_, out = "source_nbytes", "output_nbytes"
    return [
        Line(f"{title}: Mweights/s", "{:.1f}", (key,), lambda n: n["n_weights"] / wall(n) / MEGA),
        share("the kernel", lambda n: n["kernel_cpu"] / cpu(n), kernel_goal),
        share("read, decode, repack", lambda n: n["source_cpu"] / cpu(n)),
        share("write", lambda n: n["write_cpu"] / cpu(n)),
        share("hash, journal, rest", lambda n: rest(n) / cpu(n)),
        ratio(f"{title}: bytes read / source, our count", key, "nbytes_read", in_, EQUAL),
        ratio(f"{title}: bytes read / source, rchar", key, "fill_rchar", in_, EQUAL),
        ratio(f"{title}: bytes written / output, wchar", key, "fill_wchar", out, EQUAL),
        ratio(f"{title}: bytes read back / output, rchar", key, "read_back_rchar", out),
    ]


def kernel_lines() -> list[Line]:
    """The Q3_K fill against the bare kernel, both with all threads."""
    both = ("many", "kernel_many")
    name = "Q3_K: fill / bare kernel, weights per second"
    return [
        Line(
            "bare Q3_K kernel: Mweights/s",
            "{:.1f}",
            both[1:],
            lambda k: k["n_weights"] / k["kernel_wall"] / MEGA,
        ),
        Line(name, "{:.1%}", both, lambda f, k: kernel_speed(f, k, wall(f), "kernel_wall")),
        Line(
            name.replace("second", "CPU second"),
            "{:.1%}",
            both,
            lambda f, k: kernel_speed(f, k, cpu(f), "kernel_cpu"),
        ),
        Line(
            "Q3_K: CPU share of the kernel, read-back included",
            "{:.1%}",
            both[:1],
            lambda n: n["kernel_cpu"] / (cpu(n) + n["read_back_cpu"]),
        ),
    ]


def thread_lines(n: int) -> list[Line]:
    """All threads against one, and the memory they take."""
    fills, kernels, goal = ("one", "many"), ("kernel_one", "kernel_many"), speedup(n)
    name = f"{n} threads / 1:"
    lines = [
        Line(f"{name} Q3_K fill, wall", "{:.2f}", fills, lambda a, b: wall(a) / wall(b), goal),
        Line(f"{name} Q3_K fill, CPU", "{:.2f}", fills, lambda a, b: n * cpu(a) / cpu(b), goal),
        Line(
            f"{name} bare kernel, wall",
            "{:.2f}",
            kernels,
            lambda a, b: a["kernel_wall"] / b["kernel_wall"],
        ),
    ]
    peaks = (("one", "Q3_K", 1), ("many", "Q3_K", n), ("native", "native", n))
    for key, title, n_threads in peaks:
        name = f"{title}: peak anonymous MiB, threads: {n_threads}"
        goal = memory(n_threads)
        lines.append(Line(name, "{:.0f}", (key,), lambda n: n["peak_anonymous"] / MIB, goal))
    return lines


def copy_lines() -> list[Line]:
    """The native recipe, all shards, against plain copying of as many bytes."""
    pair = ("native", "copy")
    return [
        Line("native fill / copy, seconds", "{:.2f}", pair, lambda f, c: wall(f) / c["copy_wall"]),
        Line(
            "native fill and read-back / copy, seconds",
            "{:.2f}",
            pair,
            lambda f, c: (wall(f) + f["read_back_wall"]) / c["copy_wall"],
        ),
        Line(
            "native fill / copy, CPU seconds", "{:.2f}", pair, lambda f, c: cpu(f) / c["copy_cpu"]
        ),
        Line(
            "native fill and read-back / copy, CPU seconds",
            "{:.2f}",
            pair,
            lambda f, c: (cpu(f) + f["read_back_cpu"]) / c["copy_cpu"],
        ),
    ]


def rate_lines() -> list[Line]:
    """What the parts do alone."""

    def rate(name: str, key: str) -> Line:
        title = f"{name}: Mweights per CPU second"
        return Line(title, "{:.0f}", ("rates",), lambda n: n[key] / MEGA)

    def read_back(unit: str, key: str) -> Line:
        title = f"read-back, native: GB of output per {unit}"
        return Line(title, "{:.2f}", ("native",), lambda n: n["output_nbytes"] / n[key] / GB)

    return [
        rate("FP4 decode", "decode_fp4"),
        rate("FP8 decode", "decode_fp8"),
        rate("FP4 to MXFP4 repack", "repack"),
        read_back("second", "read_back_wall"),
        read_back("CPU second", "read_back_cpu"),
    ]


def lines_of(n_threads: int) -> list[Line]:
    return [
        *fill_lines("many", "Q3_K", KERNEL_SHARE),
        *kernel_lines(),
        *thread_lines(n_threads),
        *fill_lines("native", "native", None),
        *copy_lines(),
        *rate_lines(),
    ]
