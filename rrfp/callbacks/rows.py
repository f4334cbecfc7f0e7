"""Files with one row a step: the base of `JsonLines` and `Csv`."""

from __future__ import annotations

from rrfp.callbacks.base import Callback
from rrfp.callbacks.events import RunEnded, StepEnded
from rrfp.callbacks.figures import Metrics, Tokens, checked_tokens, metrics
from rrfp.callbacks.row_file import RowFile
from rrfp.core.topology import Topology


class Rows(Callback):
    """Writes on rank 0; ``file`` says where. A subclass makes the text of a row."""

    def __init__(self, file: RowFile, tokens: Tokens) -> None:
        self._file = file
        self._tokens = checked_tokens(tokens)
        self._writes = False

    def text(self, row: Metrics) -> str:
        """``row`` as one line."""
        raise NotImplementedError

    def check(self, topology: Topology) -> None:
        """See `Callback`."""
        self._writes = topology.rank == 0
        if self._writes:
            self._file.check()

    def step_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        if self._writes:
            self._file.append(self.text(metrics(event, self._tokens)))

    def evaluation_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        self.step_ended(event)

    def run_ended(self, event: RunEnded) -> None:
        """See `Callback`."""
        self._file.close()
