"""Under a limit on bytes: what is known of each forward before it runs, for the core."""

from __future__ import annotations

from collections.abc import Callable

from rrfp.compute.mailbox import Mailbox
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Task
from rrfp.core.visits import Visits
from rrfp.errors import StageError


class Previews:
    """Asks the program about each forward as soon as its inputs are here, and passes the answer to ``apply``.

    A lane that runs ahead may take a forward whose inputs are about to be computed on this rank: its signature is then
    one that no other has.
    """

    def __init__(
        self, core: StageCore, program: StageProgram, mailbox: Mailbox, apply: Callable[[ev.Event], None]
    ) -> None:
        self._core = core
        self._program = program
        self._mailbox = mailbox
        self._apply = apply
        self._graph = core.graph
        self._own = frozenset(core.graph.placement.virtual_stages(core.stage))
        self._visits = Visits(1)
        #: The forwards of this step that were previewed or enqueued.
        self._done: set[Task] = set()

    def open_step(self, visits: Visits) -> None:
        """The core has opened a step: the caller's inputs are here, and perhaps messages that were early."""
        self._done.clear()
        self._visits = visits
        for v in self._own:
            for m in visits.visitors(v):
                self._ask(Task(Kind.F, m, v))

    def after(self, event: ev.Event) -> None:
        """The core has taken in ``event``, by which a forward may have its inputs."""
        if not isinstance(event, ev.Arrived | ev.Completed) or event.task.kind is not Kind.F:
            return
        step = self._core.step
        if step is None or step.finished or (isinstance(event, ev.Arrived) and event.step != step.id):
            return
        for v in self._graph.successors[event.task.virtual_stage]:
            forward = Task(Kind.F, event.task.microbatch, v)
            if v in self._own and self._visits.exists(forward):
                self._ask(forward)

    def before_enqueue(self, task: Task) -> None:
        """The lane is about to get ``task``."""
        if task.kind is Kind.F and task not in self._done:
            self._show(ev.Previewed(task, None, (task, self._core.step and self._core.step.id)))

    def _ask(self, forward: Task) -> None:
        if forward in self._done or not self._mailbox.has_inputs(forward):
            return
        inputs = self._mailbox.inputs(forward)
        method = "signature"
        try:
            signature = self._program.signature(forward, inputs)
            hash(signature)
            method = "input_bytes"
            num_bytes = self._program.input_bytes(forward, inputs)
        except Exception as error:  # a caller's program may raise anything; here no task would be named
            name = f"{type(self._program).__name__}.{method}"
            raise StageError(f"{name} of {forward} raised {type(error).__name__}: {error}") from error
        self._show(ev.Previewed(forward, num_bytes, signature))

    def _show(self, event: ev.Previewed) -> None:
        self._done.add(event.task)
        self._apply(event)
