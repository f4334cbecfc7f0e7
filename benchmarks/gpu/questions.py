"""Settles in one call what the code assumes of CUDA and has not seen. Takes about 3 minutes; needs torch alone.

    make gpu-questions PYTHON=python3 [ARGS="--only events copies"]

Each question runs in a process of its own, with a time limit. One that fails, hangs or breaks the device prints its
error, and the others go on. The answers go to the screen and to the file as they come. See docs/gpu-tests.md for the
assumption behind each question.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.gpu import questions_of_failures, questions_of_memory, questions_of_processes, questions_of_streams

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Question:
    """One assumption.

    Attributes:
        text: the assumption.
        answer: prints the answer's lines; in a process of its own.
        limit_s: the time after which that process is killed.
    """

    text: str
    answer: Callable[[], None]
    limit_s: float = 30.0


QUESTIONS = {
    "events": Question(
        "a blocking event wakes its waiter within 60 us and does not spin; torch.Event ignores the flag",
        questions_of_streams.events,
    ),
    "gil": Question("synchronize releases the GIL, query does not", questions_of_streams.gil),
    "clock": Question("elapsed_time follows the host's clock to 1 us for 8 s", questions_of_streams.clock),
    "host": Question("launching, recording and switching streams take a few us each", questions_of_streams.host),
    "order": Question("streams of the pool do not wait for the default stream", questions_of_streams.order),
    "priority": Question("work of an urgent stream overtakes a backlog", questions_of_streams.priority),
    "backward": Question(
        "with multithreading off, backward runs on the caller's thread and on the forward's stream",
        questions_of_streams.backward,
    ),
    "fork": Question("forking both generators takes 30 to 50 us and waits for nothing", questions_of_streams.fork),
    "copies": Question("pinned memory moves 32 MiB in about 1.3 ms there and back", questions_of_memory.copies),
    "register": Question("memory of a memfd can be pinned where it is", questions_of_memory.register),
    "record_stream": Question(
        "without record_stream, memory freed by its owner is overwritten while another stream reads it",
        questions_of_memory.record_stream,
    ),
    "out_of_memory": Question("OutOfMemoryError comes from its call, and the device survives", questions_of_memory.oom),
    "assert": Question(
        "a device assert surfaces at the first event behind it, in every thread, from then on",
        questions_of_failures.device_assert,
    ),
    "freeing": Question(
        "memory with record_stream that is freed behind an assert ends its process by SIGABRT",
        questions_of_failures.freeing,
        60.0,
    ),
    "ipc": Question(
        "a process pulls from another one's memory with a copy; opening costs little after the first time",
        questions_of_processes.ipc,
        60.0,
    ),
    "ipc_busy": Question(
        "opening and dropping another process's memory wait for nothing that is queued, and hold no lock",
        questions_of_processes.ipc_busy,
        60.0,
    ),
    "ipc_death": Question("a pull survives the death of the sender", questions_of_processes.ipc_death, 60.0),
    "ipc_expandable": Question(
        "expandable segments are refused by IPC or shared by file descriptor",
        questions_of_processes.ipc_expandable,
        60.0,
    ),
    "sharing": Question("kernels of two processes on one GPU take turns", questions_of_processes.sharing, 60.0),
    "nccl": Question("NCCL refuses two ranks on one GPU", questions_of_processes.nccl, 90.0),
    "exit": Question("a process ends although a thread waits for the device", questions_of_processes.leaving, 60.0),
}


def header() -> str:
    """The machine, the versions and the date."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"{now}; {versions}; no CUDA device"
    properties = torch.cuda.get_device_properties(0)
    device = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} SMs"
    return f"{now}; {versions}; {device}"


def ask(name: str, question: Question, out: TextIO) -> None:
    """Run one question in a process of its own, and write its answer."""
    began = time.monotonic()
    command = [sys.executable, "-u", str(Path(__file__)), "--answer", name]
    _write(out, f"\n{name}: {question.text}?")
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=question.limit_s, check=False)
        answer, errors, end = done.stdout, done.stderr, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as expired:
        answer, errors = _text(expired.stdout), _text(expired.stderr)
        end = f"no end within {question.limit_s:g} s"
    for line in answer.splitlines():
        _write(out, f"    {line}")
    if end != "exit code 0":
        for line in errors.splitlines()[-6:]:
            _write(out, f"    ! {line}")
    _write(out, f"    ({end}, {time.monotonic() - began:.1f} s)")


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _write(out: TextIO, line: str) -> None:
    print(line, flush=True)
    out.write(f"{line}\n")
    out.flush()


def main() -> None:
    """Ask all questions, or answer one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=_ROOT / "out" / "gpu-questions.txt", help="the file to write")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), help="ask only these")
    parser.add_argument("--answer", choices=QUESTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        QUESTIONS[arguments.answer].answer()
        return
    if not torch.cuda.is_available():
        sys.exit(f"needs a CUDA device ({header()})")
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("w") as out:
        _write(out, header())
        for name in arguments.only:
            ask(name, QUESTIONS[name], out)
    print(f"\nwritten to {arguments.results}")


if __name__ == "__main__":
    main()
