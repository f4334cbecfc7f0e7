"""The demo as a user runs it: real processes under torchrun, and what is left when they are killed or interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from batches import long

from rrfp.lab.demo.settings import METHODS
from rrfp.lab.report import library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHORT = ("--microbatches", "4", "--warm-up", "0", "--steps", "2")
LONG = ("--stages", "2", "--steps", "50")
FIGURES = {
    "iteration_s",
    "iteration_s_spread",
    "speedup",
    "blocking",
    "blocking_by_cause",
    "peak_held",
    "peak_bytes",
    "ratio",
    "losses",
}


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rrfp", "demo", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers(out: Path) -> list[int]:
    """Process ids of the demo's workers that write to ``out``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_worker = b"rrfp.lab.demo.worker" in arguments and b"torch.distributed.run" not in arguments
        if is_worker and any(f'"{out}"'.encode() in argument for argument in arguments):
            found.append(int(process.name))
    return sorted(found)


PIPELINES = len(METHODS)
#: Connections of 2 stages: 3 channels for each pipeline, accepted at an address.
CONNECTED = 3 * PIPELINES


def num_addresses(out: Path) -> int:
    """How many ends of connections of the workers that write to ``out`` carry an address of ours."""
    own = set()
    for pid in workers(out):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(descriptor.readlink().name)
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum("@rrfp-" in line and f"socket:[{line.split()[6]}]" in own for line in lines)


def wait_until_connected(out: Path) -> list[int]:
    """Wait until all workers are connected, so that steps begin; returns their process ids."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if num_addresses(out) >= CONNECTED:
            return workers(out)
        time.sleep(0.05)
    raise AssertionError(f"the workers did not connect: {num_addresses(out)} of {CONNECTED} ends")


@pytest.mark.parametrize("stages", [2, long(4)])
def test_a_run_leaves_its_figures_its_timeline_and_its_traces(tmp_path: Path, stages: int) -> None:
    process = start(tmp_path, "--json", "--stages", str(stages), *SHORT)
    output, errors = process.communicate(timeout=120)
    lacks = [] if library.PACKAGE.exists() else ["report.html is left out: "]  # npm, or a network, was missing
    assert (process.returncode, len(errors.splitlines())) == (0, len(lacks)), errors
    assert errors.startswith("".join(lacks))
    told = json.loads(output)
    assert list(told["methods"]) == ["1f1b", "zb-h1", "bf", "b-priority", "bfw", "slot-aware", "v"]
    for figures in told["methods"].values():
        assert set(figures) == FIGURES
        assert len(figures["losses"]) == 2
        assert abs(figures["losses"][0] - told["methods"]["1f1b"]["losses"][0]) < 1e-5  # one seed, one batch
        assert figures["ratio"] >= 1
    assert told["methods"]["1f1b"]["peak_held"] == [4, 3, 2, 1][-stages:]
    assert max(told["methods"]["v"]["peak_held"]) <= stages
    held = told["methods"]["1f1b"]["peak_bytes"]
    assert all(earlier > later for earlier, later in pairwise(held[:-1]))
    assert min(held) > 0
    assert told["lower_bound_s"] > 0
    written = {path.name for path in tmp_path.iterdir()}
    traces = {f"trace-{method}.json" for method in told["methods"]}
    pages = set() if lacks else {"report.html"}
    assert written == {"summary.json", "timeline.png", "workers.log", *traces, *pages}
    assert json.loads((tmp_path / "summary.json").read_text())["methods"] == told["methods"]
    assert workers(tmp_path) == []


@pytest.mark.long
def test_deterministic_methods_train_bitwise_the_same_model(tmp_path: Path) -> None:
    process = start(tmp_path, "--json", "--deterministic", *SHORT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    methods = json.loads(output)["methods"].values()
    assert {frozenset(figures) for figures in methods} == {frozenset(FIGURES | {"weights_sha256"})}
    assert len({figures["weights_sha256"] for figures in methods}) == 1
    assert len({tuple(figures["losses"]) for figures in methods}) == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (signal.SIGKILL, "its connection ended"),
        pytest.param(signal.SIGSTOP, "its process is stopped, for 2 s already", marks=pytest.mark.long),
    ],
)
def test_a_lost_worker_is_named_in_one_line_and_nothing_is_left(
    how: signal.Signals, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text("of an earlier run")
    process = start(tmp_path, *LONG)
    pids = wait_until_connected(tmp_path)
    log = tmp_path / "workers.log"
    os.kill(pids[-1], how)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    *progress, line = errors.splitlines()
    assert progress[0].startswith("starting 2 processes: 7 methods take turns for 51 steps each")
    assert line.startswith("rrfp: aborted by stage ")
    assert line.endswith(f"PeerLostError: {reason}; log: {log}")
    assert workers(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["workers.log"]


@pytest.mark.long
def test_ctrl_c_ends_everything_and_says_so(tmp_path: Path) -> None:
    process = start(tmp_path, *LONG)
    wait_until_connected(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.splitlines()[-1]) == (130, "rrfp: interrupted")
    assert workers(tmp_path) == []
