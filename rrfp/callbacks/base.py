"""`Callback`, the base class of code that watches a run."""

from rrfp.callbacks.events import RunAborted, RunBegun, RunEnded, Stall, StepBegun, StepEnded
from rrfp.model.topology import Topology


class Callback:
    """Watches a run: ``rrfp.Pipeline(..., callbacks=[MyCallback()])``. Override what you need; the rest does nothing.

    All methods but `check` are called on a thread of their own, one after the other, in the order of the events: never
    on the runtime's loop, the compute thread or the caller's. Each process calls its own callbacks: look at
    ``event.topology.rank`` in `run_begun` to act on one rank only.

    - **Order**: `run_begun` first; then for each step `step_begun` and `step_ended`, for each evaluation
      `evaluation_ended`; `aborted` at most once, and nothing but `run_ended` after it. A `stall` comes at once,
      anywhere between the first and the last. A step whose reports had not come when the run was aborted does not end.
    - **An error** is logged with the names of callback and method, and the callback is called again for the next event;
      the number of further errors is logged at the end of the run. Training goes on with the same bits. To end it,
      raise in the training loop.
    - **A slow callback** delays neither the runtime nor the caller's steps. Once 1024 events wait, those of further
      steps are dropped: the first time is logged, and `RunEnded.dropped` has their number.
    - **At the end** leaving the pipeline waits until all events are delivered, and logs every 10 seconds for which
      callback; after a failure it waits 2 seconds at most, and logs the callback and the number of events given up.

    Python runs one thread at a time: long computations in a callback take time from the runtime's loop all the same.
    """

    def check(self, topology: Topology) -> None:
        """Look for mistakes before the run. Called once, by `rrfp.Pipeline` or `rrfp.local`, on the caller's thread.

        Args:
            topology: of this rank; of the first rank of a process with several.

        Raises:
            ConfigError: for what cannot work, such as a folder that does not exist; the pipeline is then not built.
        """

    def run_begun(self, event: RunBegun) -> None:
        """All ranks are connected.

        Args:
            event: the layout, the method, and the number of the first step.
        """

    def step_begun(self, event: StepBegun) -> None:
        """A training step begins.

        Args:
            event: its number and M.
        """

    def step_ended(self, event: StepEnded) -> None:
        """A training step has ended, and the figures of all stages are here.

        Args:
            event: its loss and figures.
        """

    def evaluation_ended(self, event: StepEnded) -> None:
        """An evaluation has ended, and the figures of all stages are here.

        Args:
            event: its loss and figures.
        """

    def stall(self, event: Stall) -> None:
        """Nothing has happened for ``stall_after`` seconds.

        Args:
            event: names the rank that is waited for.
        """

    def aborted(self, event: RunAborted) -> None:
        """The pipeline failed.

        Args:
            event: names the rank, the task and the cause.
        """

    def run_ended(self, event: RunEnded) -> None:
        """The pipeline was left, in order or after a failure.

        Args:
            event: the number of the step that would have been next.
        """
