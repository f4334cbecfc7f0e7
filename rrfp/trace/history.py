"""The newest training steps of a rank, kept for `save_trace`; bounded in steps and in spans."""

from collections import deque

from rrfp.trace.spans import DEFAULT_CAPACITY, StepTrace


class TraceHistory:
    """Keeps the traces of the newest steps."""

    def __init__(
        self,
        # The most steps that it keeps; 0 keeps none.
        steps: int,
        # The most spans of all of them together; the newest step is kept however many it has.
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        self._steps = steps
        self._capacity = capacity
        self._traces: deque[StepTrace] = deque()
        self._num_spans = 0

    def add(self, trace: StepTrace) -> None:
        """Keep the next step's ``trace``; the oldest ones go."""
        self._traces.append(trace)
        self._num_spans += trace.num_spans
        while len(self._traces) > self._steps or (len(self._traces) > 1 and self._num_spans > self._capacity):
            self._num_spans -= self._traces.popleft().num_spans

    @property
    def traces(self) -> tuple[StepTrace, ...]:
        """The traces that it keeps, by step."""
        return tuple(self._traces)
