"""Questions of streams, events and threads. Each function prints its answer, and runs in a process of its own."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: Where all questions are asked.
GPU = torch.device("cuda", 0)


def event(*, blocking: bool = False) -> torch.cuda.Event:
    """An event that records time."""
    return torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]


def stream(priority: int = 0) -> torch.cuda.Stream:
    """A stream of torch's pool."""
    return torch.cuda.Stream(GPU, priority=priority)  # type: ignore[no-untyped-call]


class Load:
    """Work of a known duration: products of matrices, large ones, since a device queues only about 1,000 launches."""

    def __init__(self, size: int = 8192) -> None:
        self._a = torch.randn(size, size, device=GPU, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self.run(3)
        torch.cuda.synchronize()
        start, end = event(), event()
        start.record()
        self.run(20)
        end.record()
        end.synchronize()
        self.product_s = start.elapsed_time(end) / 20e3

    def run(self, products: int) -> None:
        """Issue so many products on the current stream."""
        for _ in range(products):
            torch.mm(self._a, self._a, out=self._out)

    def busy(self, seconds: float) -> None:
        """Issue work for about so long on the current stream."""
        self.run(max(1, round(seconds / self.product_s)))


def median_us(call: Callable[[], object], repeats: int = 200, warm_up: int = 10) -> str:
    """The median and the largest duration of a call on the host."""
    samples = []
    for index in range(repeats + warm_up):
        began = time.perf_counter()
        call()
        if index >= warm_up:
            samples.append(time.perf_counter() - began)
    return f"{statistics.median(samples) * 1e6:.1f} us (largest {max(samples) * 1e6:.0f})"


def events() -> None:
    """What events cost, and how soon and how a thread wakes that waits for one."""
    # torch makes CUDA's event when it is recorded for the first time.
    print("create and record:", median_us(lambda: event(blocking=True).record()))
    once = event(blocking=True)
    print("record again:", median_us(once.record))
    load = Load()
    makers: dict[str, Callable[[], Any]] = {
        "cuda.Event(blocking=True)": lambda: event(blocking=True),
        "cuda.Event(blocking=False)": event,
        "torch.Event(blocking=True)": lambda: torch.Event(GPU, enable_timing=True, blocking=True),
    }
    for name, make in makers.items():
        late, spun = [], []
        for _ in range(30):
            start, end = make(), make()
            torch.cuda.synchronize()
            began = time.perf_counter()
            start.record()
            load.busy(0.01)
            end.record()
            issued, used = time.perf_counter(), time.thread_time()
            end.synchronize()
            woke = time.perf_counter()
            spun.append((time.thread_time() - used) / (woke - issued))
            late.append(woke - began - start.elapsed_time(end) / 1e3)
        wake, cpu = statistics.median(late) * 1e6, statistics.median(spun)
        print(f"{name}: wall time beyond the device's {wake:.0f} us, CPU used while waiting {cpu:.0%}")
    creations: list[float] = []
    with in_thread(lambda: load.busy(0.3)):
        while len(creations) < 2000:
            fresh = event(blocking=True)
            began = time.perf_counter()
            fresh.record()
            creations.append(time.perf_counter() - began)
    creations.sort()
    slow = f"p99 {creations[-20] * 1e6:.0f} us, max {creations[-1] * 1e6:.0f} us"
    print(f"create and record while another thread launches: {slow}")


@contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[threading.Thread]:
    """Beside the block, ``call`` on a thread, which is joined behind it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield thread
    thread.join()


def gil() -> None:
    """How fast another Python thread counts while this one waits."""
    load = Load()

    def counted(wait: Callable[[torch.cuda.Event], object]) -> float:
        counter = [0]
        ended = threading.Event()

        def count() -> None:
            while not ended.is_set():
                counter[0] += 1

        end = event(blocking=True)
        load.busy(0.3)
        end.record()
        with in_thread(count):
            began = time.perf_counter()
            wait(end)
            seconds = time.perf_counter() - began
            ended.set()
        torch.cuda.synchronize()
        return counter[0] / seconds

    def query(end: torch.cuda.Event) -> None:
        while not end.query():  # type: ignore[no-untyped-call]
            pass

    alone = counted(lambda end: time.sleep(0.3))
    print(f"counting alone: {alone:.3g} a second")
    for name, wait in (("synchronize", lambda end: end.synchronize()), ("query in a loop", query)):
        print(f"during {name}: {counted(wait) / alone:.0%} of that")


def clock() -> None:
    """How far the device's clock and the host's drift apart, and how fine the device's is."""
    base = event(blocking=True)
    base.record()
    base.synchronize()
    began = time.monotonic()
    for wait_s in (0.01, 0.1, 1.0, 3.0, 8.0):
        time.sleep(max(0.0, began + wait_s - time.monotonic()))
        point = event(blocking=True)
        point.record()
        point.synchronize()
        host_s, device_s = time.monotonic() - began, base.elapsed_time(point) / 1e3
        print(f"after {wait_s:g} s: device minus host {(device_s - host_s) * 1e6:+.1f} us")
    differences = set()
    for _ in range(200):
        start, end = event(), event()
        start.record()
        end.record()
        end.synchronize()
        differences.add(round(start.elapsed_time(end) * 1e6))
    print(f"between two events in a row: {min(differences)} to {max(differences)} ns, {len(differences)} values")


def host() -> None:
    """The host's time of single operations."""
    x, side, mark = torch.zeros(16, device=GPU), stream(), event(blocking=True)
    print("launch of a small kernel:", median_us(lambda: x.add_(1)))
    print("current_stream:", median_us(lambda: torch.cuda.current_stream(GPU)))
    print("record:", median_us(lambda: mark.record(side)))
    print("wait_event:", median_us(lambda: side.wait_event(mark)))

    def switch() -> None:
        with torch.cuda.stream(side):
            pass

    print("enter and leave a stream:", median_us(switch))
    print("record_stream and free:", median_us(lambda: torch.empty(1 << 16, device=GPU).record_stream(side)))
    torch.cuda.synchronize()


def order() -> None:
    """Whether a stream of the pool sees what the default stream has only been asked to write."""
    load, side = Load(), stream()
    value, seen = torch.zeros(1, device=GPU), torch.zeros(2, device=GPU)
    torch.cuda.synchronize()
    load.busy(0.1)
    value.fill_(1)
    with torch.cuda.stream(side):
        seen[0:1].copy_(value)
    side.synchronize()
    print(f"without a wait the stream read {seen[0].item():g} (1: it waited for the default stream; 0: it did not)")
    value.zero_()
    torch.cuda.synchronize()
    load.busy(0.1)
    value.fill_(1)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        seen[1:2].copy_(value)
    side.synchronize()
    print(f"with wait_stream it read {seen[1].item():g}")


def priority() -> None:
    """How long a copy and a small kernel take on a second stream while the first has 50 ms of work."""
    print("priorities, least and greatest:", stream().priority_range())
    load = Load()
    source, target = torch.ones(8 << 20, device=GPU), torch.empty(8 << 20, pin_memory=True)
    small = torch.zeros(1 << 16, device=GPU)

    def latency(second: torch.cuda.Stream, issue: Callable[[], object]) -> float:
        samples = []
        for _ in range(10):
            torch.cuda.synchronize()
            load.busy(0.05)
            began = time.perf_counter()
            with torch.cuda.stream(second):
                issue()
            second.synchronize()
            samples.append(time.perf_counter() - began)
        return statistics.median(samples) * 1e3

    for level in (0, -1):
        second = stream(level)
        copy_ms = latency(second, lambda: target.copy_(source, non_blocking=True))
        kernel_ms = latency(second, lambda: small.add_(1))
        print(f"priority {level}: copy of 32 MiB to the host {copy_ms:.2f} ms, small kernel {kernel_ms:.2f} ms")


def backward() -> None:
    """The thread and the stream on which a hook of backward runs."""
    for enabled in (True, False):
        seen: list[tuple[int, torch.cuda.Stream]] = []

        def hook(gradient: Tensor, seen: list[tuple[int, torch.cuda.Stream]] = seen) -> None:
            seen.append((threading.get_ident(), torch.cuda.current_stream(GPU)))

        side, x = stream(), torch.ones(8, device=GPU, requires_grad=True)
        with torch.cuda.stream(side):
            y = x * 2
            y.register_hook(hook)  # type: ignore[no-untyped-call]
            total = y.sum()
        with torch.autograd.set_multithreading_enabled(enabled):
            total.backward()  # type: ignore[no-untyped-call]
        thread, current = seen[0]
        own = "the caller's" if thread == threading.get_ident() else "another"
        where = "the forward's" if current == side else "another"
        print(f"multithreading {enabled}: {own} thread, {where} stream")
    torch.cuda.synchronize()


def fork() -> None:
    """What swapping the generators' states costs, idle and while the device is busy."""
    generators = {"CPU": torch.default_generator, "CUDA": torch.cuda.default_generators[0]}

    def forked(names: tuple[str, ...]) -> None:
        states = [generators[name].get_state() for name in names]
        for name in names:
            generators[name].manual_seed(5)
        for name, state in zip(names, states, strict=True):
            generators[name].set_state(state)

    for names in (("CPU",), ("CUDA",), ("CPU", "CUDA")):
        print(f"{' and '.join(names)}:", median_us(lambda names=names: forked(names)))  # type: ignore[misc]
    load = Load()
    load.busy(0.5)
    print("both, with 0.5 s of work queued:", median_us(lambda: forked(("CPU", "CUDA")), repeats=100))
    torch.cuda.synchronize()
    masks = []
    for _ in range(2):
        generators["CUDA"].manual_seed(7)
        masks.append(torch.rand(64, device=GPU))
    print("the same seed draws the same:", torch.equal(*masks))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            generators["CUDA"].manual_seed(7)
        print("seeding during capture: accepted")
    except RuntimeError as error:
        print("seeding during capture:", " ".join(str(error).split())[:200])
