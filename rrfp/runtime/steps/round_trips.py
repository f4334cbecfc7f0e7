"""``limit="auto"`` on one rank: it measures round trips in its steps, and takes the limit that all agree on in between.

An echo goes out beside a few of the forward outputs of a step, to the stage that reads them, which sends it back at
once. It is a control message, so it never waits behind tensors, and no part of its time grows with bytes. The lower
quartile of a step's echoes counts, since others may have waited for a busy loop. No clocks are compared, and no echo is
sent under another limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from rrfp.core import events as ev
from rrfp.errors import ProtocolError
from rrfp.log import get_logger
from rrfp.memory.round_trips import FollowedLimits, StageMeasure
from rrfp.model.tasks import Kind, Mode
from rrfp.model.topology import Topology
from rrfp.trace.spans import StepTrace
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

#: The most echoes of a step to one stage.
MOST_ECHOES = 8


class LimitFollower:
    """Measures for ``limits``, and tells their changes; ``post`` queues a control message for a rank."""

    def __init__(
        self,
        topology: Topology,
        limits: FollowedLimits,
        post: Callable[[int, Message], None],
        now: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._post = post
        self._now = now
        self._every = 1
        #: Outputs of the step by stage, and the echoes on their way by number: to which stage and rank, and since when.
        self._outputs = Counter[int]()
        self._numbers = count()
        self._out: dict[int, tuple[int, int, float]] = {}
        self._seconds: dict[int, list[float]] = {}

    @property
    def microbatches(self) -> int:
        """K of this stage in the next step."""
        return self._limits.own(self._topology.stage)

    @property
    def claimed_ahead(self) -> int:
        """Forwards that this stage claims before it begins them in the next step, where replicas share them."""
        return self._limits.claimed_ahead[self._topology.stage]

    def open(self, microbatches: int) -> None:
        """A step begins, in which this rank sends about so many outputs."""
        self._every = -(-microbatches // MOST_ECHOES)
        self._outputs.clear()

    def on_send(self, send: ev.Send) -> None:
        """An output leaves: perhaps an echo does too."""
        if send.task.kind is not Kind.F:
            return
        stage = send.peer
        if self._outputs[stage] % self._every == 0 and self._outputs[stage] < self._every * MOST_ECHOES:
            number, rank = next(self._numbers), self._topology.rank_of(stage, send.copy)
            self._out[number] = stage, rank, self._now()
            self._echo(rank, number, back=False)
        self._outputs[stage] += 1

    def on_message(self, message: Message) -> None:
        """An ECHO arrived: of another rank, or back."""
        body, sender = message.body, message.sender
        number, back = body.get("number"), body.get("back")
        if type(number) is int and back is False:
            self._echo(sender, number, back=True)
            return
        unknown = -1, -1, 0.0
        stage, rank, since = self._out.pop(number, unknown) if type(number) is int else unknown
        if rank != sender:
            raise ProtocolError(f"rank {sender} sent back an echo that it did not get: {dict(body)!r:.80}")
        self._seconds.setdefault(stage, []).append(max(0.0, self._now() - since))

    def _echo(self, rank: int, number: int, *, back: bool) -> None:
        self._post(rank, Message(Channel.CONTROL, MessageKind.ECHO, body={"number": number, "back": back}))

    def measure(self, trace: StepTrace) -> StageMeasure:
        by_microbatch: dict[int, float] = {}
        for span in trace.tasks:
            m = span.task.microbatch
            by_microbatch[m] = by_microbatch.get(m, 0.0) + span.end - span.start
        seconds, self._seconds = self._seconds, {}
        quartiles = {stage: sorted(own)[len(own) // 4] for stage, own in seconds.items()}
        return StageMeasure.of([*by_microbatch.values()], quartiles)

    def observe(self, mode: Mode, measures: Sequence[StageMeasure]) -> None:
        """All ranks have reported on a step; ``measures`` are by rank."""
        if mode is not Mode.TRAIN:  # which has no backward tasks
            return
        topology = self._topology
        leaders = [replace(topology, stage=stage).leader for stage in range(topology.stages)]
        change = self._limits.observe([measures[leader] for leader in leaders])
        if change is not None and topology.mesh.is_first(topology.rank) and topology.stage == 0:
            logger.info("limit auto: %s", change)
