"""What runs on a GPU machine is tried here with the double: to the end, and never how fast."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from fork_server import fork_server, printed

from benchmarks.gpu import wheels
from benchmarks.gpu.all import run_one

__all__ = ["fork_server"]

ROOT = Path(__file__).resolve().parents[2]


def make(target: str, out: Path, *, arguments: str = "", timeout_s: float = 110.0) -> tuple[str, str]:
    """Run a make target with the double; its text file and what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    variables = [f"PYTHON={sys.executable}", "DEVICE=double", f"GPU_OUT={out}", f"ARGS={arguments}"]
    done = subprocess.run(
        ["make", target, *variables],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return (out / f"{target}.txt").read_text(), done.stdout


@pytest.mark.long
@pytest.mark.timeout(120)
def test_make_gpu_test_writes_every_outcome_and_figure(tmp_path: Path) -> None:
    text, _ = make("gpu-test", tmp_path, arguments="-k '1f1b or doctor or spoilt and large'")
    assert "device: the double" in text
    assert "passed tests/gpu/test_local.py::test_the_demos_gpt[strict 1f1b] (" in text
    assert "    largest relative difference of gradients: " in text
    assert text.splitlines()[-1].startswith("3 passed; exit status 0")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_make_gpu_test_runs_every_test_on_the_double(tmp_path: Path) -> None:
    text, _ = make("gpu-test", tmp_path, timeout_s=1190.0)
    # Of the checks of lanes: 15 need room for an offer, which a device's lane lacks, and one needs a depth of 2.
    assert re.fullmatch(r"\d+ passed, 16 skipped; exit status 0", text.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.long
def test_make_gpu_bench_writes_every_part(tmp_path: Path) -> None:
    text, told = make("gpu-bench", tmp_path, arguments="--json")
    for part in ("gaps (", "launches (", "host (", "staging (", "processes (", "step (", "two ("):
        assert f"\n{part}" in text
    for line in (
        "    depth 2: ",
        "    a fork of the generators, CPU and device: ",
        "    rank to rank, zmq, ",
        "    process to process, cuda_ipc, ",
        "    into a busy process, cuda_ipc, ",
        "    a step of two processes over cuda_ipc: ",
    ):
        assert line in text
    assert "at most" not in text  # an aim means nothing on the double
    document = json.loads(told.splitlines()[-1])
    assert document["failed"] == []
    assert set(document["gaps"]["by_depth"]) == {"1", "2"}
    assert {rate["way"] for rate in document["staging"]} >= {"device to host", "rank to rank, inproc"}
    assert document["processes"]["has_slots"]
    assert {rate["way"] for rate in document["processes"]["rates"]} == {"cuda_ipc", "shm"}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_make_gpu_all_goes_on_after_a_part_that_fails_and_writes_as_it_goes(tmp_path: Path) -> None:
    folder = tmp_path / "gpu-all"
    (folder / "04-tests.txt").mkdir(parents=True)  # so that part 4 cannot write
    variables = [f"PYTHON={sys.executable}", "DEVICE=double", f"GPU_OUT={tmp_path}", "ARGS=--only 1 4 7"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "gpu-all", *variables],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=190,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-3000:]
    summary = (folder / "summary.txt").read_text()
    numbered = re.findall(r"^(\d+)\. .*\n   (exit code \d+), \d+ s, (.*)$", summary, re.MULTILINE)
    assert [line[0] for line in numbered] == ["4", "7"]  # 1 asks a GPU
    assert numbered[0][1] != "exit code 0"
    assert numbered[1][1:] == ("exit code 0", "07-tests.txt")
    assert (folder / "07-tests.txt").read_text().splitlines()[-1] == "3 passed; exit status 0"


def await_end(process: int) -> None:
    """Wait until a process that may be no child has ended."""
    deadline, status = time.monotonic() + 10, Path(f"/proc/{process}/status")
    while status.exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "a process was left"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_gpu_all_that_is_stopped_leaves_what_it_found_and_no_process(number: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu/all.py"), "--device", "double", "--results", str(tmp_path)]
    results, deadline = tmp_path / "04-tests.txt", time.monotonic() + 150
    with subprocess.Popen([*command, "--only", "4", "7"], stdout=subprocess.PIPE, text=True) as running:
        try:
            while not (results.exists() and "\npassed " in results.read_text()):
                assert time.monotonic() < deadline, "no test of the part ended"
                time.sleep(0.05)
            (part,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            running.send_signal(number)
            told, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130
    assert told.splitlines()[-1] == f"stopped; what was found is in {tmp_path}"
    assert re.search(r"^   interrupted, \d+ s, 04-tests.txt$", (tmp_path / "summary.txt").read_text(), re.MULTILINE)
    assert re.search(r"^passed ", results.read_text(), re.MULTILINE)
    assert results.read_text().splitlines()[-1].endswith("; exit status 2")
    await_end(int(part))


def test_a_part_that_takes_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "child"
    script = f"sleep 100 & echo $! > {path}; wait"
    assert run_one(["bash", "-c", script], 2.0) == "stopped after 2 s"
    await_end(int(path.read_text()))
    assert run_one([sys.executable, "-c", "raise SystemExit(3)"], 20.0) == "exit code 3"


@pytest.mark.long
def test_without_a_gpu_the_benchmark_says_so() -> None:
    told = printed(ROOT / "benchmarks" / "gpu" / "run.py", variables={"CUDA_VISIBLE_DEVICES": ""})
    assert told == "needs a CUDA device; --device double shows that everything runs\n"


def wheel(folder: Path, name: str) -> None:
    """A wheel of an empty package."""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_what_is_lacking_comes_from_wheels_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carried, site = tmp_path / "wheels", tmp_path / "site"
    carried.mkdir()
    wheel(carried, "rrfp_lacks_this")
    wheel(carried, "pytest")
    wheels.install(carried, site)
    assert capsys.readouterr().out == "unpacked from wheels: rrfp-lacks-this\n"
    assert (site / "rrfp_lacks_this.py").exists()
    assert not (site / "pytest.py").exists()


def test_what_is_lacking_and_not_carried_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "minimums", lambda: {"rrfp-lacks-this": (), "pytest": (1000,)})
    with pytest.raises(SystemExit, match=r"lacks rrfp-lacks-this, pytest, and .* no wheel of it: run make gpu-wheels"):
        wheels.install(tmp_path, tmp_path / "site")


def test_requirements_come_without_torch() -> None:
    required = wheels.minimums()
    assert required["pyzmq"] == (26,)
    assert required["pytest-asyncio"] == (0, 26)
    assert "torch" not in required
