"""Short-queue: feed the next stages while they have little of this stage's work, drain backwards otherwise."""

from __future__ import annotations

from rrfp.hints import Hint, Kind, ReadySet, Task, View


class ShortQueue(Hint):
    """Forwards first while the next stages hold few outputs of this stage, backwards first otherwise.

    Of a stage's two directions, only one queue is visible in the view: the forward outputs that later stages have
    received and not started to use. Their count travels with gradients, so it is slightly old, and there is none before
    the first gradient. Until then every output counts as waiting. Weight tasks run when neither direction is ready.

    Args:
        enough: outputs that may wait downstream, for each receiving stage and chunk, before backwards come first.
    """

    def __init__(self, enough: int = 1) -> None:
        self.enough = enough
        #: By local chunk, the other stages that read each of its forward outputs.
        self._receivers: tuple[int, ...] = ()

    def open_step(self, view: View) -> None:
        """Count the receivers of each chunk."""
        graph, stage = view.graph, view.stage
        self._receivers = tuple(
            len({graph.stage_of[successor] for successor in graph.successors[v]} - {stage})
            for v in view.placement.virtual_stages(stage)
        )

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `Hint.choose`."""
        feeds = self.waiting_downstream(view) < self.enough * sum(self._receivers)
        first, second = (Kind.F, Kind.B) if feeds else (Kind.B, Kind.F)
        return ready.first(first) or ready.first(second) or ready.first(Kind.W)

    def waiting_downstream(self, view: View) -> int:
        """Outputs of this stage that later stages have not started to use, as far as this stage knows."""
        sent = sum(view.num_enqueued(Kind.F, chunk) * count for chunk, count in enumerate(self._receivers))
        return sent - (view.consumed_downstream or 0)
