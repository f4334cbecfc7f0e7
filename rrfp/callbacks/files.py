"""The files of a run: a row for each step (`JsonLines`, `Csv`), and TensorBoard's events."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from rrfp.callbacks.base import Callback, RunAborted, RunBegun, RunEnded, StepEnded
from rrfp.callbacks.step_metrics import STEP_NAMES, Metrics, Tokens, checked_tokens, metric_names, metrics
from rrfp.errors import ConfigError, RrfpError
from rrfp.log import get_logger
from rrfp.model.topology import Topology
from rrfp.plain import path_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = get_logger(__name__)

#: No row is longer.
_TAIL_BYTES = 1 << 20


class RowFile:
    """Appends rows to ``path``.

    A row is written whole or not at all; the remains of one that a killed process left at the end are cut off. They
    begin with ``start``: any other unfinished line is the caller's own, and refused. ``head`` is the first line.
    """

    def __init__(self, path: str | os.PathLike[str], start: str = "", head: str = "") -> None:
        self.path = path_of("path", path)
        self.head = head
        self._start = start.encode()
        self._descriptor: int | None = None

    def check(self) -> None:
        """Refuse a file that cannot be written, or has other content."""
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise ConfigError(f"{self.path} must be a file in a folder that exists")
        if not os.access(self.path if self.path.exists() else self.path.absolute().parent, os.W_OK):
            raise ConfigError(f"{self.path} cannot be written: permission denied")
        self._whole_bytes()
        if not self._is_empty() and self.head:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                first = file.readline()
            if first != f"{self.head}\n" and not (self.head.startswith(first) and not first.endswith("\n")):
                raise ConfigError(
                    f"{self.path} has other columns than this run, such as those of another number of stages: choose "
                    "another file"
                )

    def append(self, row: str) -> None:
        """Write one row; an RrfpError says that nothing of it is in the file."""
        try:
            if self._descriptor is None:
                self._descriptor = self._open()
            self._write(self._descriptor, row)
        except OSError as error:
            raise RrfpError(f"a row for {self.path} is lost: {error.strerror}") from error

    def close(self) -> None:
        """End; a later `append` opens the file again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_empty(self) -> bool:
        return not self.path.exists() or not self.path.stat().st_size

    def _open(self) -> int:
        whole = self._whole_bytes()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if whole < os.fstat(descriptor).st_size:
                logger.warning("%s ended in the middle of a row, which is cut off", self.path)
                os.ftruncate(descriptor, whole)
            if self.head and not whole:
                self._write(descriptor, self.head)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _whole_bytes(self) -> int:
        """The bytes of whole rows; refuses other content behind them."""
        if not self.path.is_file() or self._is_empty():
            return 0
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
        remains = tail[tail.rfind(b"\n") + 1 :]
        begins = remains.startswith(self._start) or self._start.startswith(remains)
        if remains and not begins and not (len(remains) == size and self.head.encode().startswith(remains)):
            raise ConfigError(f"{self.path} does not end with a row of a run: choose another file")
        return size - len(remains)

    @staticmethod
    def _write(descriptor: int, row: str) -> None:
        data, before = f"{row}\n".encode(), os.fstat(descriptor).st_size
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, before)
            raise OSError(0, "the disk is full")


class Rows(Callback):
    """Writes on rank 0; a subclass makes the text of a row."""

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


class Csv(Rows):
    """Appends a row for each step and evaluation, with the columns of `rrfp.callbacks.metrics`; on rank 0 only.

    The first line names the columns. A resumed run goes on in the same file, if its columns are the same: another
    number of stages needs another file. The steps between its checkpoint and the end of the run before are in it twice
    then: the later row counts. A figure that does not exist, such as a limit that is not set, is an empty cell.

    Args:
        path: of the file, in a folder of rank 0's host that exists.
        tokens: as in `JsonLines`.

    Raises:
        ConfigError: for an impossible ``path`` or ``tokens``; by the pipeline on rank 0, where the file cannot be
            written or has other columns.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        super().__init__(RowFile(path), tokens)

    def check(self, topology: Topology) -> None:
        """See `Callback`."""
        self._file.head = ",".join(metric_names(topology.stages))
        super().check(topology)

    def text(self, row: Metrics) -> str:
        """See `Rows`."""
        values = map(row.get, self._file.head.split(","))  # of a step without a lost rank there are no stages
        return ",".join("" if value is None else str(value) for value in values)


class JsonLines(Rows):
    """Appends a line of JSON for each step and evaluation, with the names of `rrfp.callbacks.metrics`; on rank 0 only.

    A resumed run goes on in the same file. The steps between its checkpoint and the end of the run before are in it
    twice then: the later row counts. A number that JSON lacks, such as a loss of nan, is null.

    Args:
        path: of the file, in a folder of rank 0's host that exists.
        tokens: of a microbatch, for ``tokens_per_second``, or a function of `StepEnded` that returns those of the step,
            over all replicas, such as ``lambda step: sum(step.sizes)``; None: not known.

    Raises:
        ConfigError: for an impossible ``path`` or ``tokens``; by the pipeline on rank 0, where the file cannot be
            written or ends with something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        super().__init__(RowFile(path, start='{"time": '), tokens)

    def text(self, row: Metrics) -> str:
        """See `Rows`."""
        return json.dumps({name: None if _is_no_number(value) else value for name, value in row.items()})


def _is_no_number(value: float | str | None) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


#: What a scalar is not: it says which step it is.
_KEYS = ("time", "mode", "step", "completed", "microbatches")


class TensorBoard(Callback):
    """Writes the figures of `rrfp.callbacks.metrics` as scalars; on rank 0 only. Needs the extra ``tensorboard``.

    Those of a training step are ``train/loss``, ``train/seconds``, ``train/tokens_per_second`` and, for each stage,
    ``blocked_input/stage0`` and so on; of an evaluation ``evaluation/loss`` and its seconds and tokens. They lie at
    `StepEnded.completed`. Steps that a resumed run runs again replace those of the run before.

    Args:
        folder: of the event files, on rank 0's host; it is made where it does not exist.
        tokens: as in `JsonLines`.

    Raises:
        ConfigError: if the package ``tensorboard`` is not installed, or ``folder`` or ``tokens`` is impossible.
    """

    def __init__(self, folder: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401 - slow, but better now than in the middle of a run
        except ImportError:
            raise ConfigError(
                "rrfp.callbacks.TensorBoard needs the package tensorboard: pip install 'rrfp[tensorboard]'"
            ) from None
        self._folder = str(path_of("folder", folder))
        self._tokens = checked_tokens(tokens)
        self._writer: SummaryWriter | None = None

    def run_begun(self, event: RunBegun) -> None:
        """See `Callback`."""
        if event.topology.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder, purge_step=event.step + 1 if event.step else None)

    def step_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        self._add(event, "train")

    def evaluation_ended(self, event: StepEnded) -> None:
        """See `Callback`."""
        self._add(event, "evaluation")

    def aborted(self, event: RunAborted) -> None:
        """See `Callback`."""
        if self._writer is not None:
            self._writer.flush()

    def run_ended(self, event: RunEnded) -> None:
        """See `Callback`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, event: StepEnded, mode: str) -> None:
        if self._writer is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=f"{mode}/{name}" if name in STEP_NAMES else name, simple_value=value)
            for name, value in metrics(event, self._tokens).items()
            if value is not None and name not in _KEYS and (name in STEP_NAMES or mode == "train")
        ]
        # One record for all: `add_scalar` would write one for each, and take ten times as long.
        writer: Any = self._writer.file_writer
        writer.add_summary(Summary(value=values), event.completed, walltime=event.time)
