"""What RRFP costs on a GPU. Takes about 2 minutes; without a CUDA device it says so and ends.

    make gpu-bench PYTHON=python3
    python benchmarks/gpu/run.py [--quick] [--json] [--device cuda|stub|double] [--results FILE]
                                 [--only PART ...]

gaps: seconds on the device from the end of a task's kernel to the beginning of the next task's, at depth 1 and 2, in a
pipeline of one stage, whose tasks are one kernel of 1 ms and more. "plain": the same kernels launched in a loop.

launches: a stage of two layers of width 1024, whose kernels are shorter than their launches: seconds a microbatch at
depth 1, 2 and 3 and in a plain loop, the share of time in which the device computes nothing, and the longest time for
which another Python thread waited.

host: seconds of the host for tasks that launch nothing, on the lane of the device and on the CPU's: a call with two on
the lane, a call alone (from enqueueing to completion), a task of a pipeline of one stage; and of a fork of the random
generators.

staging: tensors one at a time, between device and host, and from rank to rank in this process.

processes: tensors from this process to another one on the same device, one at a time, until its answer: by slots
(`cuda_ipc`) and staged (`shm`) in turns, into a process that is idle and into one that computes; and this process's
CPU time of a message of 1 KiB each way.

step: a step of four stages by `rrfp.local` beside the same microbatches in a plain loop, in turns, on the same modules.
A pair of steps whose plain one took over 1.1 of the median is discarded, and counted.

two: a step of two stages in a process each on one device, pulled and staged in turns.

Medians throughout. With `--device double`, or `stub`, it shows that everything runs; its figures mean nothing, as with
`--quick`.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu.processes import Between, measure_between
from benchmarks.gpu.staging import Rate, measure_staging
from benchmarks.gpu.step import WORKS, StepTimes, TwoProcesses, measure_step, measure_two_processes
from benchmarks.gpu.target import DEVICES, Target, header, open_target
from benchmarks.gpu.tasks import Gaps, HostTimes, LaunchBound, measure_gaps, measure_host, measure_launch_bound
from benchmarks.shared.figures import Aim, Spread, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    product: int
    microbatches: int
    rounds: int
    calls: int
    sizes: tuple[int, ...]
    repeats: int
    work: str
    width: int


FULL = Size(8192, 32, 5, 1000, (1 << 20, 32 << 20, 256 << 20), 20, "large", 1024)
QUICK = Size(32, 3, 1, 20, (1 << 12,), 2, "small", 64)


def main() -> None:
    """Measure, and write as the results come."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--results", type=Path, help="write everything into this file, too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="only these")
    arguments = parsed(parser)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; --device double shows that everything runs")
        return
    size = QUICK if arguments.quick or arguments.device != "cuda" else FULL
    report = _Report(arguments.results, to_screen=not arguments.json)
    report.write(*header(arguments.device))
    load = OtherLoad()
    with open_target(arguments.device) as target:
        for name in arguments.only:
            measure, lines = PARTS[name]
            report.add(name, lambda measure=measure: measure(target, size), lines)  # type: ignore[misc]
    if size is FULL:
        report.write("", *(_aim_line(aim) for aim in report.aims))
    report.write("", load.sentence())
    if arguments.json:
        parts = {name: _plain(part) for name, part in report.parts.items()}
        aims = [aim.to_json() for aim in report.aims]
        print(json.dumps({**parts, "failed": report.failed, "aims": aims, "other_load": load.share()}))
    if report.failed:
        sys.exit(f"failed: {', '.join(report.failed)}")


class _Report:
    """The results so far.

    Args:
        path: a file for them; None for none.
        to_screen: whether to print them.
    """

    def __init__(self, path: Path | None, *, to_screen: bool) -> None:
        self.parts: dict[str, Any] = {}
        self.aims: list[Aim] = []
        self.failed: list[str] = []
        self._to_screen = to_screen
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")

    def add(
        self, name: str, measure: Callable[[], Any], describe: Callable[[Any], tuple[list[str], list[Aim]]]
    ) -> None:
        """Measure one part; if it fails, the others go on."""
        began = time.monotonic()
        try:
            part = measure()
            lines, aims = describe(part)
        except Exception:
            self.failed.append(name)
            self.write("", f"{name} FAILED", *traceback.format_exc().splitlines())
            return
        self.parts[name] = part
        self.aims += aims
        self.write("", f"{name} ({time.monotonic() - began:.0f} s)", *(f"    {line}" for line in lines))

    def write(self, *lines: str) -> None:
        """Write lines at once: a device that hangs later must not take them along."""
        for line in lines:
            if self._to_screen:
                print(line, flush=True)
            if self._file is not None:
                self._file.write(f"{line}\n")
        if self._file is not None:
            self._file.flush()


def _spread(spread: Spread) -> str:
    return f"{us(spread.p50)} us (p99 {us(spread.p99)}, {spread.samples} samples)"


def _gaps(gaps: Gaps) -> tuple[list[str], list[Aim]]:
    lines = [f"depth {depth}: {_spread(spread)}" for depth, spread in gaps.by_depth.items()]
    lines += [f"plain: {_spread(gaps.plain)}", f"one kernel: {us(gaps.kernel_s)} us"]
    aim = Aim("gap between kernels of consecutive tasks at depth 2", gaps.by_depth[2].p50 * 1e6, 20, unit="us")
    return lines, [aim]


def _host(host: HostTimes) -> tuple[list[str], list[Aim]]:
    lines = [f"a call, two on the lane of the {name}: {us(s)} us" for name, s in host.call.items()]
    lines += [f"a call alone on the lane of the {name}: {_spread(s)}" for name, s in host.alone.items()]
    lines += [f"a task of a pipeline on the {name}: {us(s)} us" for name, s in host.task.items()]
    lines += [f"a fork of the generators, {name}: {us(s)} us" for name, s in host.fork.items()]
    return lines, []


def _launches(times: LaunchBound) -> tuple[list[str], list[Aim]]:
    lines = [f"a microbatch in a plain loop: {us(times.plain_s)} us"]
    for depth, seconds in times.by_depth.items():
        hold = us(times.longest_hold_s[depth])
        lines.append(f"a microbatch at depth {depth}: {us(seconds)} us; another thread waited {hold} us at most")
    if times.idle is not None:
        lines.append(f"the device computes nothing for {times.idle:.0%} of a step at depth 2")
    return lines, []


def _two(times: TwoProcesses) -> tuple[list[str], list[Aim]]:
    lines = [f"a step of two processes over {way}: {seconds * 1e3:.1f} ms" for way, seconds in times.by_way.items()]
    return [*lines, f"median ratio, pulled by staged: {times.ratio:.4f}"], []


def _staging(rates: list[Rate]) -> tuple[list[str], list[Aim]]:
    return _rate_lines(rates), []


def _processes(between: Between) -> tuple[list[str], list[Aim]]:
    lines = [] if between.has_slots else ["cuda_ipc: the trial failed, so both ways are staged"]
    lines += [f"process to process, {line}" for line in _rate_lines(between.rates)]
    lines += [f"into a busy process, {line}" for line in _rate_lines(between.busy_rates)]
    lines += [f"host time of a small message, {way}: {us(seconds)} us" for way, seconds in between.host_s.items()]
    return lines, []


def _rate_lines(rates: list[Rate]) -> list[str]:
    return [
        f"{rate.way}, {rate.num_bytes / 2**20:g} MiB: {rate.gb_per_s:.2f} GB/s, {us(rate.seconds)} us" for rate in rates
    ]


def _step(times: StepTimes) -> tuple[list[str], list[Aim]]:
    lines = [
        f"plain loop {times.plain_s * 1e3:.1f} ms, rrfp.local {times.pipeline_s * 1e3:.1f} ms, "
        f"median ratio {times.ratio:.4f}",
        f"{times.disturbed} of {times.pairs} pairs discarded as disturbed; held by stage: {times.peak_held}",
    ]
    return lines, [Aim("a 4-stage step more than the plain loop", (times.ratio - 1) * 100, 3, unit="%")]


def _aim_line(aim: Aim) -> str:
    return f"{aim.name}: {aim.value:.1f} {aim.unit}, {aim.sense} {aim.limit:g}: {'met' if aim.met else 'NOT met'}"


def _plain(part: Any) -> Any:
    return [asdict(one) for one in part] if isinstance(part, list) else asdict(part)


#: By name: how a part is measured, and how it is described.
PARTS: dict[str, tuple[Callable[[Target, Size], Any], Callable[[Any], tuple[list[str], list[Aim]]]]] = {
    "gaps": (
        lambda target, size: measure_gaps(
            target, size=size.product, microbatches=size.microbatches, rounds=size.rounds
        ),
        _gaps,
    ),
    "launches": (
        lambda target, size: measure_launch_bound(
            target, width=size.width, microbatches=size.microbatches, rounds=size.rounds
        ),
        _launches,
    ),
    "host": (lambda target, size: measure_host(target, calls=size.calls), _host),
    "staging": (lambda target, size: measure_staging(target, sizes=size.sizes, repeats=size.repeats), _staging),
    "processes": (
        lambda target, size: measure_between(
            target, sizes=size.sizes, repeats=size.repeats, messages=max(20, size.calls // 4), product=size.product
        ),
        _processes,
    ),
    "step": (lambda target, size: measure_step(target, WORKS[size.work]), _step),
    "two": (lambda target, size: measure_two_processes(target, size.work), _two),
}


if __name__ == "__main__":
    main()
