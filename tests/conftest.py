"""What holds for every test: nothing blocks an event loop, nothing is left running, torch uses one thread."""

from __future__ import annotations

import loop_guard

loop_guard.install()  # before anything that is tested is imported

import gc  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import second_try  # noqa: E402
import torch  # noqa: E402
from batches import FULL  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from leak_guard import LeakGuard  # noqa: E402

#: For the status sockets of this process's jobs, and of those that it starts: `rrfp top` finds no others here.
STATUS_SOCKETS = os.environ["RRFP_TOP"] = tempfile.mkdtemp(prefix="rrfp-")

# A shell starts jobs in the background with Ctrl-C ignored, which the programs of tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
for profile in ("quick", FULL):  # how long an example takes is the machine's affair
    settings.register_profile(profile, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")
os.environ.pop("COLUMNS", None)  # set in xdist's workers, it would narrow every command's tables


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than the cores that this process may use: a third of the tests' time is waiting."""
    # Where psutil is installed, xdist would count the machine's cores.
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cuda", "stub", "double"),
        default="cuda",
        help="where tests marked gpu run; stub and double: on the CPU",
    )
    parser.addoption("--results", type=Path, help="write a text file with the outcome and figures of every test")


def pytest_configure(config: pytest.Config) -> None:
    second_try.register(config)
    if (path := config.getoption("results")) is not None:
        from gpu.results import Results

        config.pluginmanager.register(Results(path, config.getoption("device")))


def pytest_unconfigure() -> None:
    shutil.rmtree(STATUS_SOCKETS, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is made meanwhile becomes garbage, and to look for some takes longer than the rest."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test that says so, marks the combinations long whose parameters' positions add up to an odd number.

    The others have every value of each parameter.
    """
    if isinstance(item, pytest.Function) and item.get_closest_marker("every_other") and sum(_positions(item)) % 2:
        item.add_marker(pytest.mark.long)


def _positions(item: pytest.Function) -> Iterator[int]:
    """Which of its values each parameter of a test has; the index that pytest gives counts combinations."""
    number = next(iter(item.callspec.indices.values()))
    for mark in reversed(list(item.iter_markers("parametrize"))):
        number, position = divmod(number, len(mark.args[1]))
        yield position


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or config.getoption("device") == "double":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def guards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that blocked an event loop (`allow_blocking` lifts that) or left a thread or a process behind."""
    loop_guard.take_violations()
    leak_guard = LeakGuard()
    yield
    problems = [f"left behind: {leak}" for leak in leak_guard.leaks()]
    violations = loop_guard.take_violations()
    if not request.node.get_closest_marker("allow_blocking"):
        problems += violations
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
