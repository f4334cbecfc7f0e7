"""Half an hour on a GPU, in the order of what it settles: the questions first that decide what to change.

    make gpu-all PYTHON=python3 [ARGS="--only 1 2"]

Each part runs in a process of its own with a time limit, and writes its own file as it goes; a line of each goes into
the summary. So it may be stopped anywhere (Ctrl-C or SIGTERM: exit code 130), and a part that fails, hangs or breaks
the device does not stop the others, nor leaves processes to them. With `--device stub` or `double` the parts that ask
or time a GPU are left out.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

from benchmarks.gpu.target import DEVICES, header  # noqa: E402


@dataclass(frozen=True, slots=True)
class Part:
    """A program and its arguments.

    Attributes:
        program: ``questions``, ``tests`` or ``bench``.
        arguments: which of them.
        settles: what is known afterwards.
        limit_s: when it is stopped.
    """

    program: str
    arguments: tuple[str, ...]
    settles: str
    limit_s: float

    @property
    def needs_gpu(self) -> bool:
        """Whether it makes no sense over a stand-in."""
        return self.program == "questions"


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/gpu/{name}.py" for name in names)


#: How a part ends whose results are good.
GOOD = "exit code 0"

#: A stand-in computes on the host's cores, which others may use too: so many times longer may a part last there.
STAND_IN = 4

#: For a part that is stopped to end by itself.
_LAST_WORDS_S = 10.0

_FIRST = ("events", "gil", "host", "fork", "priority", "backward", "ipc_busy")

PARTS = (
    Part("questions", ("--only", *_FIRST), "what calls of CUDA cost and hold", 240),
    Part("tests", _tests("test_failures"), "whether a failed kernel names its task, and the process ends", 150),
    Part("questions", ("--only", "freeing", "assert", "out_of_memory"), "what a failure does to freed memory", 150),
    Part("tests", (*_tests("test_lane", "test_doctor"),), "whether lanes keep their contract on CUDA", 180),
    Part("tests", (*_tests("test_local"), "-k", "demos_gpt or caller"), "whether a pipeline runs at all", 180),
    Part("bench", ("--only", "gaps", "launches", "host", "step"), "what RRFP costs on one device", 300),
    Part("tests", _tests("test_memory"), "whether received memory is safe; its control must differ once", 200),
    Part("tests", _tests("test_transports", "test_cuda_ipc"), "whether processes move tensors right", 360),
    Part("bench", ("--only", "staging", "processes", "two"), "how fast processes move tensors", 300),
    Part("tests", _tests("test_processes"), "whether processes train right", 240),
    Part("tests", (*_tests("test_local"), "-k", "not (demos_gpt or caller)"), "the rest of one process", 240),
    Part("questions", ("--only", "clock", "order", "copies", "register", "record_stream", "ipc"), "the rest", 240),
    Part(
        "questions",
        ("--only", "ipc_death", "ipc_expandable", "sharing", "nccl", "exit"),
        "what remains of processes",
        300,
    ),
)


def command(part: Part, device: str, results: Path) -> list[str]:
    """The command of a part, which writes ``results``."""
    python = [sys.executable, "-u"]
    if part.program == "tests":
        plugins = ["-p", "asyncio", "-p", "timeout", "-m", "gpu", "-W", "default", "-q"]
        return [*python, "-m", "pytest", *part.arguments, *plugins, "--device", device, "--results", str(results)]
    if part.program == "bench":
        script, more = "run.py", ["--device", device]
    else:
        script, more = "questions.py", []
    return [*python, f"benchmarks/gpu/{script}", *more, "--results", str(results), *part.arguments]


def run(parts: Sequence[tuple[int, Part]], device: str, folder: Path) -> bool:
    """Run parts one after the other; whether all ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    is_good = True
    with (folder / "summary.txt").open("a") as summary:

        def write(line: str) -> None:
            print(line, flush=True)
            summary.write(f"{line}\n")
            summary.flush()

        for line in header(device):
            write(line)
        for number, part in parts:
            results = folder / f"{number:02}-{part.program}.txt"
            write(f"{number}. {part.settles}: {part.program} {' '.join(part.arguments)}")
            began, end = time.monotonic(), "interrupted"
            try:
                end = run_one(command(part, device, results), part.limit_s * (1 if device == "cuda" else STAND_IN))
            finally:
                write(f"   {end}, {time.monotonic() - began:.0f} s, {results.name}")
            is_good &= end == GOOD
    return is_good


def run_one(arguments: Sequence[str], limit_s: float) -> str:
    """Run a command in a group of processes of its own, of which none is left; says how it ended."""
    process = subprocess.Popen(arguments, cwd=_ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return f"exit code {process.wait(limit_s)}"
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # so that it writes its sum, and ends its children
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Run all parts, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--results", type=Path, default=_ROOT / "out" / "gpu-all", help="the folder of the results")
    numbers = range(1, len(PARTS) + 1)
    parser.add_argument("--only", nargs="+", type=int, choices=numbers, default=list(numbers), help="only these parts")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a process with CUDA has the size of its address space
    chosen = [
        (number, PARTS[number - 1])
        for number in arguments.only
        if arguments.device == "cuda" or not PARTS[number - 1].needs_gpu
    ]
    try:
        return 0 if run(chosen, arguments.device, arguments.results) else 1
    except KeyboardInterrupt:
        print(f"stopped; what was found is in {arguments.results}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
