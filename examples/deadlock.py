"""A deadlock and its report: a hint waits for a task that can never become ready.

python examples/deadlock.py
"""

import logging

import torch
from torch import nn

import rrfp


class Stubborn(rrfp.Hint):
    """Waits on stage 1 for microbatch 1 before 0; with memory for one microbatch it never arrives."""

    may_wait = True

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        """The next task, or None to wait."""
        wanted = rrfp.Task(rrfp.Kind.F, 1, 1)
        if view.stage == 1 and view.num_enqueued_total == 0:
            return wanted if wanted in ready else None
        return next(iter(ready))


def main() -> None:
    """Run one step that cannot end."""
    logging.getLogger("rrfp").addHandler(logging.NullHandler())  # the report is in the exception as well
    stages = [nn.Linear(4, 4) for _ in range(2)]
    microbatches = [torch.randn(2, 4) for _ in range(2)]
    pipeline = rrfp.local(stages, hint=Stubborn, limit=1, loss_fn=nn.functional.mse_loss, stall_after=1.0)
    try:
        with pipeline as pipe:
            pipe.step(microbatches, microbatches)
    except rrfp.PipelineAborted as aborted:
        print(aborted)


if __name__ == "__main__":
    main()
