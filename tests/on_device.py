"""pytest plugin: every rank without a lane of its own computes on a device double: ``-p on_device --device-double 2``.

The number is the depth of the lanes. Each rank has a device of its own. A test fails if its doubles report a race. The
processes that tests start inherit the number by an environment variable, and call `on_double_if_asked`.
``--device-lane`` puts a class of `compute.wrong_lanes` in the place of `StreamLane`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import Device
from rrfp.lab.device_double import DoubleDevice
from rrfp.pipeline import build, device_choice
from rrfp.pipeline.options import Options

#: Environment variable with the depth of the lanes.
DEPTH = "RRFP_TEST_DEVICE_DOUBLE"

#: How long the double takes for a block.
SECONDS = 0.001

#: These state what holds at depth 1: with a second task under way, a limit on bytes admits other forwards.
EXACT_AT_DEPTH_1 = frozenset(
    {
        "test_a_forward_is_previewed_where_a_limit_on_bytes_asks_for_it",
        "test_after_larger_steps_the_limit_is_used_in_full_again",
        "test_what_a_split_backward_adds_is_kept_free",
    }
)


@dataclass
class Doubles:
    """Gives every rank a device.

    Attributes:
        depth: of the lanes.
        lane_class: theirs.
        devices: those made since the last call of `close`.
        made: how many there were in all.
    """

    depth: int
    lane_class: type[StreamLane] = StreamLane
    devices: list[DoubleDevice] = field(default_factory=list)
    made: int = 0
    _has_lane: bool = False

    def choose(self, modules: Any, option: Any, *_: Any) -> Device | None:
        """In place of `choose_device`."""
        if self._has_lane or isinstance(option, Device):
            return option if isinstance(option, Device) else None
        self.made += 1
        self.devices.append(DoubleDevice(SECONDS))
        return self.devices[-1]

    def lane(self, *args: Any, **kwargs: Any) -> StreamLane:
        """In place of the class of a rank's lane."""
        return self.lane_class(*args, **{"depth": self.depth, **kwargs})

    def close(self) -> list[str]:
        """Close all devices; returns their problems."""
        devices, self.devices = self.devices, []
        for device in devices:
            device.close()
        return [problem for device in devices for problem in device.problems]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, ranks that are built in this process compute on doubles."""
        original = build.RankBuilder.__init__

        def init(builder: build.RankBuilder, job: build.Job, options: Options, *args: Any, **kwargs: Any) -> None:
            self._has_lane = options.lane is not None  # such as a lane of virtual time, which a device cannot keep
            original(builder, job, options, *args, **kwargs)

        with (
            patch.object(build.RankBuilder, "__init__", init),
            patch.object(build, "choose_device", self.choose),
            patch.object(device_choice, "StreamLane", self.lane),
        ):
            yield


@contextmanager
def on_double_if_asked(*, builds_ranks: bool = True) -> Iterator[None]:
    """Within, ranks of a process that a test has started compute on doubles, if the environment asks for it.

    Raises:
        AssertionError: at the end, if a double reports a race, or if there were no ranks though ``builds_ranks``.
    """
    if DEPTH not in os.environ:
        yield
        return
    doubles = Doubles(int(os.environ[DEPTH]))
    with doubles.installed():
        yield
    problems = doubles.close()
    assert doubles.made or not builds_ranks, "no rank computed on a double"
    assert not problems, said(problems)


def said(problems: list[str]) -> str:
    """The first problems, a line each."""
    return "\n".join([f"the device double reports {len(problems)} problems:", *problems[:5]])


class Plugin:
    """The double in pytest."""

    def __init__(self, doubles: Doubles) -> None:
        self.doubles = doubles
        self.problems: Counter[str] = Counter()

    @pytest.fixture(autouse=True)
    def on_device(self, guards: None) -> Iterator[None]:
        """Fails a test in which the double found a race."""
        self.doubles.close()
        yield
        if problems := self.doubles.close():
            self.problems.update(line.partition(": ")[2] for line in problems)
            pytest.fail(said(problems), pytrace=False)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests that hold at depth 1 only."""
        for item in items:
            if self.doubles.depth > 1 and getattr(item, "originalname", "") in EXACT_AT_DEPTH_1:
                item.add_marker(pytest.mark.skip(reason="states what holds on a lane of depth 1"))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line, and the most frequent problems."""
        terminalreporter.write_line(f"device double: depth {self.doubles.depth}, {self.doubles.made} ranks")
        for problem, count in self.problems.most_common(8):
            terminalreporter.write_line(f"{count:6} x {problem}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device-double", type=int, metavar="DEPTH", help="compute on device doubles, at this depth")
    parser.addoption("--device-lane", metavar="CLASS", help="a class of compute.wrong_lanes in the place of StreamLane")


def pytest_configure(config: pytest.Config) -> None:
    if (depth := config.getoption("--device-double")) is None:
        return
    os.environ[DEPTH] = str(depth)
    doubles, stack = Doubles(depth), ExitStack()
    if (name := config.getoption("--device-lane")) is not None:
        from compute import wrong_lanes

        doubles.lane_class = getattr(wrong_lanes, name)
    stack.enter_context(doubles.installed())
    config.add_cleanup(stack.close)
    config.pluginmanager.register(Plugin(doubles))
