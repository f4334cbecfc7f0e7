"""Questions of two processes on one GPU. Each function prints its answer, and starts the second process itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.questions_of_streams import GPU, Load, event, in_thread, stream

_MIB = 1 << 20

#: CUDA does not survive a fork.
_spawn = multiprocessing.get_context("spawn")


class _Second:
    """A second process, which runs ``program(connection)``."""

    def __init__(self, program: Callable[[Connection], None], **variables: str) -> None:
        self.connection, there = _spawn.Pipe()
        os.environ.update(variables)
        self.process = _spawn.Process(target=program, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def receive(self, timeout_s: float = 30.0) -> Any:
        """The next message of the process."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"the second process sends nothing (exit code {self.process.exitcode})")
        return self.connection.recv()

    def end(self) -> None:
        """Let it end, and wait."""
        self.connection.close()
        self.process.join(10)
        print(f"the second process ended with exit code {self.process.exitcode}")


def _share(tensor: Tensor) -> tuple[Any, ...]:
    """The fields by which another process opens the memory: bytes and integers."""
    fields: tuple[Any, ...] = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return fields


def _open(fields: tuple[Any, ...]) -> Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=GPU).set_(storage)


def _sender(connection: Connection) -> None:
    """Share the tensors that are asked for, by size in bytes, until the connection ends."""
    kept = []
    try:
        while True:
            size = connection.recv()
            began = time.perf_counter()
            tensor = torch.full((size,), 7, dtype=torch.uint8, device=GPU)
            torch.cuda.synchronize()
            made = time.perf_counter()
            fields = _share(tensor)
            kept.append(tensor)
            connection.send((fields, made - began, time.perf_counter() - made))
    except EOFError:
        pass


def ipc() -> None:
    """Pull tensors out of another process's memory: what opening costs, and the bandwidth."""
    second, receiving = _Second(_sender), stream(-1)
    for size in (_MIB, 32 * _MIB, 32 * _MIB, 256 * _MIB):
        second.connection.send(size)
        fields, _, sharing_s = second.receive()
        began = time.perf_counter()
        view = _open(fields)
        opening_s = time.perf_counter() - began
        target = torch.empty(size, dtype=torch.uint8, device=GPU)
        samples = []
        for _ in range(10):
            start, end = event(), event()
            with torch.cuda.stream(receiving):
                start.record()
                target.copy_(view, non_blocking=True)
                end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        rate = size / statistics.median(samples) / 1e9
        right = bool((target == 7).all())
        began = time.perf_counter()
        del view
        dropping_s = time.perf_counter() - began
        print(
            f"{size // _MIB} MiB: share {sharing_s * 1e6:.0f} us, open {opening_s * 1e6:.0f} us, "
            f"copy {rate:.0f} GB/s, drop {dropping_s * 1e6:.0f} us, right {right}"
        )
    fields_text = ", ".join(f"{type(field).__name__}" for field in fields)
    print(f"the fields of a share: {fields_text}")
    second.end()


def ipc_busy() -> None:
    """Open, copy and drop while a second of work is queued here: how long each takes, and what holds the GIL."""
    second, receiving, load = _Second(_sender), stream(-1), Load()
    copied = event(blocking=True)
    for queued_s in (0.0, 1.0):
        second.connection.send(32 * _MIB)
        fields, _, _ = second.receive()
        target = torch.empty(32 * _MIB, dtype=torch.uint8, device=GPU)
        kept: list[Tensor] = []

        def open_it(fields: tuple[Any, ...] = fields, kept: list[Tensor] = kept) -> None:
            kept.append(_open(fields))

        def copy(target: Tensor = target, kept: list[Tensor] = kept) -> None:
            with torch.cuda.stream(receiving):
                target.copy_(kept[0], non_blocking=True)
                copied.record()
            copied.synchronize()

        load.busy(queued_s)
        steps: dict[str, Callable[[], None]] = {"open": open_it, "copy": copy, "drop": kept.clear}
        for name, step in steps.items():
            counts, ended = [0], threading.Event()

            def count(counts: list[int] = counts, ended: threading.Event = ended) -> None:
                while not ended.is_set():
                    counts[0] += 1

            with in_thread(count):
                began = time.perf_counter()
                step()
                seconds = time.perf_counter() - began
                ended.set()
            print(
                f"{queued_s:g} s queued, {name}: {seconds * 1e6:.0f} us, another thread counted "
                f"{counts[0] / max(seconds, 1e-6):.3g} a second"
            )
        torch.cuda.synchronize()
    second.end()


def ipc_death() -> None:
    """Kill the sender while its memory is being copied, and look at the copy, the device and a later pull."""
    second, receiving, size = _Second(_sender), stream(-1), 1 << 30
    second.connection.send(size)
    fields, _, _ = second.receive()
    view = _open(fields)
    target = torch.empty(size, dtype=torch.uint8, device=GPU)
    load, end = Load(), event(blocking=True)
    with torch.cuda.stream(receiving):
        load.busy(0.5)  # the copies begin after the death
        for _ in range(50):
            target.copy_(view, non_blocking=True)
        end.record()
    assert second.process.pid is not None
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.join(10)
    print("sender dead before the copies ended:", not end.query())  # type: ignore[no-untyped-call]
    end.synchronize()
    print("the copy is right:", bool((target == 7).all()))
    del view
    torch.cuda.synchronize()
    print("the device computes:", torch.ones(4, device=GPU).sum().item() == 4)


def ipc_expandable() -> None:
    """Share a tensor that lies in an expandable segment."""
    second = _Second(
        _sender, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", PYTORCH_ALLOC_CONF="expandable_segments:True"
    )
    second.connection.send(32 * _MIB)
    fields, _, sharing_s = second.receive()
    print(f"shared in {sharing_s * 1e6:.0f} us")
    view = _open(fields)
    print("opened and right:", bool((view == 7).all()))
    del view
    second.end()


def _busy_second(connection: Connection) -> None:
    load = Load()
    connection.send("ready")
    try:
        while connection.recv():
            load.busy(1.0)
            torch.cuda.synchronize()
    except EOFError:
        pass


def sharing() -> None:
    """How long the same work takes alone and beside another process's."""
    second, load = _Second(_busy_second), Load()
    second.receive()

    def seconds(work_s: float) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        load.busy(work_s)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    alone = seconds(0.3)
    second.connection.send(True)
    time.sleep(0.2)  # until its work has begun
    print(f"0.3 s of work: alone {alone:.3f} s, beside another process {seconds(0.3):.3f} s")
    second.end()


_NCCL = """
import datetime, sys, time, torch
from torch import distributed
rank, path = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(0)
distributed.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2,
                               timeout=datetime.timedelta(seconds=20))
x = torch.full((4,), float(rank), device="cuda")
began = time.monotonic()
try:
    distributed.send(x, 1) if rank == 0 else distributed.recv(x, 0)
    torch.cuda.synchronize()
    print(f"rank {rank}: {x.tolist()} after {time.monotonic() - began:.2f} s", flush=True)
except Exception as error:
    print(f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
"""


def nccl() -> None:
    """Two ranks of one NCCL communicator on one GPU, as NCCL is and with its experimental variable."""
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    for value in ("0", "1"):
        environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": value}
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-u", "-c", _NCCL]
            ranks = [
                subprocess.Popen(
                    [*command, str(rank), f"{folder}/store"],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for rank in range(2)
            ]
            for rank in ranks:
                try:
                    answer, _ = rank.communicate(timeout=35)
                except subprocess.TimeoutExpired:
                    rank.kill()
                    answer = f"{rank.communicate()[0]}killed after 35 s"
                print(f"NCCL_MULTI_RANK_GPU_ENABLE={value}: {answer.strip() or f'exit code {rank.returncode}'}")


_LEAVING = """
import threading, time, torch
from benchmarks.gpu.questions_of_streams import Load, event
load, end = Load(), event(blocking=True)
load.busy(10.0)
end.record()
threading.Thread(target=end.synchronize, daemon=True).start()
print(time.time(), flush=True)
"""


def leaving() -> None:
    """How long a process takes to end while 10 s of work are queued and a daemon thread waits for them."""
    done = subprocess.run([sys.executable, "-c", _LEAVING], capture_output=True, text=True, timeout=50, check=False)
    ended = time.time()
    if done.returncode == 0:
        print(f"the interpreter ended {ended - float(done.stdout):.1f} s after its last line")
    else:
        print(f"exit code {done.returncode}: {done.stderr[-500:]}")
