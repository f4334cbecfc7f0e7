"""A callback that remembers every event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rrfp.callbacks import (
    Callback,
    Event,
    RunAborted,
    RunBegun,
    RunEnded,
    Stall,
    StepBegun,
    StepEnded,
)


class Notes(Callback):
    """Every event, with the name of its method.

    Args:
        then: called with method and event, after they were noted.
        folder: at the end, a file for each rank with its methods, steps and losses.
    """

    def __init__(self, then: Callable[[str, Any], object] | None = None, folder: Path | None = None) -> None:
        self.found: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self._then = then
        self._folder = folder
        self._changed = threading.Condition()

    def __reduce__(self) -> Any:  # into another process, before the run
        return Notes, (self._then, self._folder)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.found]

    def of(self, method: str) -> list[Any]:
        """The events of one method."""
        return [event for name, event in self.found if name == method]

    def wait_for(self, method: str) -> Any:
        """The first event of ``method``."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.of(method), 20), self.methods
        return self.of(method)[0]

    def wait_for_stall(self, *parts: str) -> int:
        """The index of the first stall within a step whose text has all ``parts``: a busy machine has others."""

        def chosen() -> list[int]:
            begun = "step_begun" in self.methods and self.methods.index("step_begun")
            stalls = [(index, event.text) for index, (name, event) in enumerate(self.found) if name == "stall"]
            return [index for index, text in stalls if begun and index > begun and all(part in text for part in parts)]

        with self._changed:
            assert self._changed.wait_for(chosen, 20), self.found
            return chosen()[0]

    def _note(self, method: str, event: Event) -> None:
        with self._changed:
            self.found.append((method, event))
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()
        if self._then is not None:
            self._then(method, event)

    def run_begun(self, event: RunBegun) -> None:
        self._note("run_begun", event)

    def step_begun(self, event: StepBegun) -> None:
        self._note("step_begun", event)

    def step_ended(self, event: StepEnded) -> None:
        self._note("step_ended", event)

    def evaluation_ended(self, event: StepEnded) -> None:
        self._note("evaluation_ended", event)

    def stall(self, event: Stall) -> None:
        self._note("stall", event)

    def aborted(self, event: RunAborted) -> None:
        self._note("aborted", event)

    def run_ended(self, event: RunEnded) -> None:
        self._note("run_ended", event)
        if self._folder is not None:
            lines = [f"{method} {each.step} {getattr(each, 'loss', None)}" for method, each in self.found]
            (self._folder / str(self.of("run_begun")[0].topology.rank)).write_text("\n".join(lines))
