"""Questions of memory: copies, pinned memory, reuse, and running out. Each function prints its answer."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.questions_of_streams import GPU, Load, event, median_us, stream

_MIB = 1 << 20


def copies() -> None:
    """Bandwidth of copies between the device and the host, alone and in both directions at once."""
    for size in (_MIB, 32 * _MIB, 256 * _MIB):
        device = torch.ones(size, dtype=torch.uint8, device=GPU)
        pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        pageable = torch.ones(size, dtype=torch.uint8)
        rates = {
            "to pinned": _rate(lambda p=pinned, d=device: p.copy_(d, non_blocking=True), size),  # type: ignore[misc]
            "from pinned": _rate(lambda p=pinned, d=device: d.copy_(p, non_blocking=True), size),  # type: ignore[misc]
            "to pageable": _rate(lambda p=pageable, d=device: p.copy_(d), size),  # type: ignore[misc]
            "on the device": _rate(lambda d=device: d.clone(), size),  # type: ignore[misc]
            "both ways, two streams": _both_ways(size),
        }
        print(f"{size // _MIB} MiB, GB/s:", ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(
        "a pinned tensor of 32 MiB again:",
        median_us(lambda: torch.empty(32 * _MIB, dtype=torch.uint8, pin_memory=True)),
    )
    began = time.perf_counter()
    torch.empty(512 * _MIB, dtype=torch.uint8, pin_memory=True)
    print(f"a new pinned tensor of 512 MiB: {(time.perf_counter() - began) * 1e3:.0f} ms")


def _rate(copy: Callable[[], object], size: int) -> float:
    samples = []
    for _ in range(10):
        start, end = event(), event()
        start.record()
        copy()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) / 1e3)
    return size / statistics.median(samples) / 1e9


def _both_ways(size: int) -> float:
    streams = stream(-1), stream(-1)
    pairs = [
        (torch.ones(size, dtype=torch.uint8, device=GPU), torch.ones(size, dtype=torch.uint8, pin_memory=True))
        for _ in streams
    ]
    samples = []
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for side, (device, pinned), to_host in zip(streams, pairs, (True, False), strict=True):
            with torch.cuda.stream(side):
                (pinned if to_host else device).copy_(device if to_host else pinned, non_blocking=True)
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - began)
    return 2 * size / statistics.median(samples) / 1e9


def register() -> None:
    """Pinning memory of a memfd where it is, as slots of shared memory would be."""
    size = 64 * _MIB
    file = os.memfd_create("question")
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
    slot = torch.frombuffer(memory, dtype=torch.uint8)
    slot.fill_(1)
    device = torch.empty(size, dtype=torch.uint8, device=GPU)
    before = _rate(lambda: device.copy_(slot, non_blocking=True), size)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    code = runtime.cudaHostRegister(slot.data_ptr(), size, 0)
    registered_ms = (time.perf_counter() - began) * 1e3
    print(
        f"cudaHostRegister of 64 MiB: code {int(code)}, {registered_ms:.1f} ms; torch says pinned: {slot.is_pinned()}"
    )
    after = _rate(lambda: device.copy_(slot, non_blocking=True), size)
    print(f"copy to the device: {before:.1f} GB/s before, {after:.1f} GB/s after")
    print("cudaHostUnregister: code", int(runtime.cudaHostUnregister(slot.data_ptr())))


def record_stream() -> None:
    """What a slow reader sees of memory that its owner has freed and made anew."""
    load, owner, reader = Load(), stream(), stream()
    for noted in (False, True):
        with torch.cuda.stream(owner):
            shared = torch.ones(_MIB, device=GPU)
        reader.wait_stream(owner)
        with torch.cuda.stream(reader):
            load.busy(0.05)
            total = shared.sum()
            copy = shared.clone()
        if noted:
            shared.record_stream(reader)
        address = shared.data_ptr()
        del shared
        with torch.cuda.stream(owner):
            poison = torch.full((_MIB,), float("nan"), device=GPU)
        reused = poison.data_ptr() == address
        torch.cuda.synchronize()
        wrong = bool(torch.isnan(copy).any()) or bool(torch.isnan(total))
        print(f"record_stream {noted}: memory reused at once {reused}, the reader saw garbage {wrong}")
        del poison, copy, total


def oom() -> None:
    """The error of an allocation that does not fit, and whether the device works on."""
    kept: list[Tensor] = []
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        kept.extend(torch.empty(total // 3, dtype=torch.uint8, device=GPU) for _ in range(4))
        print("no error")
    except torch.OutOfMemoryError as error:
        print(f"{type(error).__mro__[1].__name__} > {type(error).__name__}: {str(error)[:200]}")
    kept.clear()
    print("afterwards the device computes:", torch.ones(4, device=GPU).sum().item() == 4)
