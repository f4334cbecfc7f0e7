"""Metrics for TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rrfp.callbacks.base import Callback
from rrfp.callbacks.events import Aborted, RunBegun, RunEnded, StepEnded
from rrfp.callbacks.metrics import STEP_NAMES, Tokens, checked_tokens, metrics
from rrfp.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
        ConfigError: if the package ``tensorboard`` is not installed, or ``tokens`` is impossible.
    """

    def __init__(self, folder: str | os.PathLike[str], *, tokens: Tokens = None) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401 - slow, but better now than in the middle of a run
        except ImportError:
            raise ConfigError(
                "rrfp.callbacks.TensorBoard needs the package tensorboard: pip install 'rrfp[tensorboard]'"
            ) from None
        self._folder = os.fspath(folder)
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

    def aborted(self, event: Aborted) -> None:
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
