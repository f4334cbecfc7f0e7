"""The input of a stage's core (events, past tense) and its output (instructions, imperative).

Both are plain, immutable data. Events that a peer caused carry the :class:`StepId` of the peer's step: the core files
messages that run ahead, and names a disagreement about the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rrfp.errors import Origin
from rrfp.model.record import record
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.model.visits import Visits


@record
class Pool:
    """How the copies of a stage share the forwards of a step.

    Attributes:
        copy: this rank's replica.
        copies: replicas.
        homes: by microbatch, the replica whose caller has it.
        depth: forwards that a copy has claimed and not begun, at most.
        paces: seconds that a microbatch takes on each copy of this stage; empty: not known.
        is_even: the last steps have shown that no copy of any stage is slow; the same on all ranks. False where callers
            pass sizes.
    """

    copy: int
    copies: int
    homes: tuple[int, ...]
    depth: int = 1
    paces: tuple[float, ...] = ()
    is_even: bool = False

    def interleaved(self, order: Sequence[int]) -> list[int]:
        """The microbatches of each replica in ``order``, those of all side by side."""
        of_home: list[list[int]] = [[] for _ in range(self.copies)]
        for m in order:
            of_home[self.homes[m]].append(m)
        places = [(k / len(own), copy, m) for copy, own in enumerate(of_home) for k, m in enumerate(own)]
        return [m for *_, m in sorted(places)]


@record
class StepOpened:
    """The caller began a step on this rank. Steps are numbered 0, 1, 2, ... without gaps.

    Attributes:
        step: its number.
        mode: training or forward only.
        microbatches: M.
        sizes: how large each microbatch is, in any unit (tokens, patches), where the caller knows; for hints.
        size_correlation: the least correlation of the sizes with the times of any stage in an earlier step, the same on
            every rank; None: not known.
        visits: which virtual stages of the whole pipeline each microbatch visits, the same on every rank. None: all.
        limit: K of this stage in this step, at least 1, where it changes between steps; None: the stage's own.
        byte_rooms: by stage, how many average microbatches its limit on bytes had room for in an earlier step, the
            same on every rank; None: not known, or bytes are not limited.
        pool: how this stage's copies share its forwards; microbatches are those of all replicas then. None: they do
            not.
    """

    step: int
    mode: Mode
    microbatches: int
    sizes: tuple[float, ...] | None = None
    size_correlation: float | None = None
    visits: Visits | None = None
    limit: int | None = None
    byte_rooms: tuple[float | None, ...] | None = None
    pool: Pool | None = None


@record
class Arrived:
    """The output of ``task``, which ran on another stage, is here.

    Attributes:
        step: the sender's step.
        task: the *producer*: ``F3@4`` is the output of the forward of 3 on virtual stage 4, an input of ``F3@5``.
        num_bytes: size of its tensors.
        consumed: how many of this stage's forward outputs the sender had started to use by then; None if not reported.
    """

    step: StepId
    task: Task
    num_bytes: int = 0
    consumed: int | None = None


@record
class Enqueued:
    """The lane accepted ``task``. Local dependants count it as done from here on: the lane runs in order.

    Attributes:
        task: the task.
    """

    task: Task


@record
class Previewed:
    """The inputs of ``task``, a forward that has not started, show how large it is; the answer to `Preview`.

    Attributes:
        task: the forward.
        input_bytes: bytes of its inputs, or any number that its bytes grow with; None: not known.
        signature: what decides how many bytes it will hold, such as the shapes of its inputs: forwards of one virtual
            stage with equal signatures hold as many. None where that is not known; these count as equal.
    """

    task: Task
    input_bytes: int | None = None
    signature: Hashable = None


@record
class Completed:
    """``task`` has really finished.

    Attributes:
        task: the task.
        held: bytes that its microbatch still holds on its virtual stage afterwards.
        output: bytes of its output that ``held`` does not count; they stay until no task here reads them any longer and
            no send does.
        seconds: how long the lane was busy with it.
    """

    task: Task
    held: int = 0
    seconds: float = 0.0
    output: int = 0


@record
class SendReleased:
    """The transport no longer reads the memory of ``task``'s output on its way to stage ``peer``."""

    task: Task
    peer: int


@record
class Consumed:
    """Forward only: stage ``peer`` is done with the output of ``task``, a forward of this stage."""

    step: StepId
    peer: int
    task: Task


@record
class Offered:
    """Replicas share forwards: ``task``, one of this stage, may be claimed; replica ``copy`` holds its input."""

    step: StepId
    task: Task
    copy: int


@record
class Claimed:
    """Replicas share forwards: replica ``copy`` asks to run ``task``, whose input this rank holds."""

    step: StepId
    task: Task
    copy: int


@record
class Granted:
    """Replicas share forwards: replica ``copy`` runs ``task``, a forward of this stage.

    It is this rank's own only on the first stage, where no input arrives instead.
    """

    step: StepId
    task: Task
    copy: int


@record
class BegunReported:
    """The forward ``task`` has begun on another stage, and its output comes here. Only advice: see `rrfp.core.step`.

    Attributes:
        step: the sender's step.
        task: the forward.
        seconds: how long it is expected to take, the mean of its kind there.
    """

    step: StepId
    task: Task
    seconds: float


@record
class PauseBegun:
    """The stage idles by choice from now on; see `Idle`."""


@record
class PauseEnded:
    """The longest wait is over, or the forward that was to be awaited is expected too late."""


@record
class ReadyReported:
    """Leader only: on follower ``member`` everything that ``task`` needs from other stages has arrived."""

    step: StepId
    member: int
    task: Task


@record
class Ordered:
    """Follower only: entry number ``sequence`` of the leader's log is ``task``."""

    step: StepId
    sequence: int
    task: Task


@record
class HeldReported:
    """Leader only: after ``task`` completed on follower ``member``, so many bytes stay there; see `Completed`."""

    step: StepId
    member: int
    task: Task
    held: int
    output: int = 0


@record
class ChunkReduced:
    """The gradients of ``virtual_stage`` are final on this rank."""

    virtual_stage: int


@record
class Aborted:
    """Some rank failed. Terminal."""

    origin: Origin


Event = (
    StepOpened
    | Arrived
    | Previewed
    | Enqueued
    | Completed
    | SendReleased
    | Consumed
    | Offered
    | Claimed
    | Granted
    | BegunReported
    | PauseBegun
    | PauseEnded
    | ReadyReported
    | Ordered
    | HeldReported
    | ChunkReduced
    | Aborted
)
"""What happens on a stage, as `Hint.observe` receives it."""


@record
class Run:
    """Hand ``task`` to the lane. Only ``decide`` gives this."""

    task: Task


@record
class Idle:
    """Enqueue nothing yet. Only ``decide`` gives this, where a hint prefers to wait; see `rrfp.core.step`.

    The shell reports `PauseBegun` and times the wait, or `PauseEnded` at once. The wait ends when another task is
    decided, as by the arrival of what it awaits, or by `PauseEnded` after ``longest``.

    Attributes:
        task: the backward that would run.
        awaited: the forward of another stage for whose output the stage waits.
        due: seconds from the report that it has begun to its expected arrival.
        longest: seconds; where the arrival is expected later than that from now, the stage does not wait.
    """

    task: Task
    awaited: Task
    due: float
    longest: float


@record
class Preview:
    """Report with `Previewed` how large the forward ``task`` is, where its inputs show that: all of them are here now.

    Only under a limit on bytes.
    """

    task: Task


@record
class ReportBegun:
    """Tell stage ``peer`` that this stage has begun the forward ``task``, which is expected to take ``seconds``."""

    task: Task
    peer: int
    seconds: float


@record
class Send:
    """Send the output of ``task`` to stage ``peer``, and report ``SendReleased`` when the memory is free.

    Attributes:
        consumed: to travel in the header: how many outputs of ``peer``'s forwards this stage has started to use.
        copy: the replica that it goes to; None: this rank's own.
    """

    task: Task
    peer: int
    consumed: int = 0
    copy: int | None = None


@record
class Offer:
    """Replicas share forwards: tell all copies of its stage that ``task`` may be claimed."""

    task: Task


@record
class Claim:
    """Replicas share forwards: ask the rank of replica ``copy`` that holds the input of ``task`` for it."""

    task: Task
    copy: int


@record
class Grant:
    """Replicas share forwards: tell the copies of its stage but ``copy``, which runs ``task``, and this rank itself."""

    task: Task
    copy: int


@record
class Give:
    """Replicas share forwards: send replica ``copy`` what this rank's caller passed for the microbatch of ``task``.

    On the first stage this grants it: `Granted` there.
    """

    task: Task
    copy: int


@record
class Release:
    """Nothing needs the output of ``task``, produced here or received, any longer: drop it."""

    task: Task


@record
class Credit:
    """Forward only: notify stage ``peer`` that this stage is done with the output of ``task``."""

    peer: int
    task: Task


@record
class ReportReady:
    """Follower only: report to the leader that all inputs of ``task`` from other stages have arrived."""

    task: Task


@record
class Order:
    """Leader only: broadcast log entry ``sequence`` = ``task`` to the followers."""

    sequence: int
    task: Task


@record
class ReduceChunk:
    """All tasks of ``virtual_stage`` are done: make its gradients final, then report ``ChunkReduced``."""

    virtual_stage: int


@record
class FinishStep:
    """Everything of the step is done on this rank: tasks, sends, credits, reductions."""

    step: StepId


Instruction = (
    Run
    | Idle
    | Preview
    | ReportBegun
    | Send
    | Offer
    | Claim
    | Grant
    | Give
    | Release
    | Credit
    | ReportReady
    | Order
    | ReduceChunk
    | FinishStep
)
