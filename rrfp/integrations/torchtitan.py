"""RRFP for users of torchtitan: `schedule_class`, which knows RRFP besides torch's schedules.

torchtitan finds the class of a schedule by its name, in one function that its pipeline module imports. Three lines in
a training script put this one in its place::

    import torchtitan.distributed.pipeline_parallel as titan
    from rrfp.integrations.torchtitan import schedule_class

    titan.get_schedule_class = schedule_class

The schedule of a configuration may then be RRFP: ``--parallelism.pipeline_parallel_schedule RRFP``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from rrfp.errors import ConfigError
from rrfp.integrations.torch import ScheduleRRFP
from rrfp.integrations.torch.private import Stage, mesh_of

__all__ = ["NAME", "TitanSchedule", "schedule_class"]

#: The schedule's name in a configuration.
NAME = "RRFP"

#: The dims of torchtitan's mesh whose ranks join in collectives of every task, with the degrees that make them.
IN_TASKS = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "ep": "expert_parallel_degree"}


class TitanSchedule(ScheduleRRFP):
    """`ScheduleRRFP` over stages of torchtitan, whose mesh says whether tasks have collectives.

    Their parameters need not show it: those of context parallelism are whole.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        stage = stages[0] if isinstance(stages, Sequence) else stages
        if degrees := [degree for dim, degree in IN_TASKS.items() if mesh_of(stage, (dim,)) is not None]:
            raise ConfigError(
                f"{', '.join(degrees)} must be 1 with the schedule {NAME}: tasks would have collectives, and each rank "
                "runs tasks in an order of its own"
            )
        super().__init__(stages, n_microbatches, loss_fn, **options)


def schedule_class(name: str, **options: Any) -> Any:
    """The class of the schedule ``name``, in upper or lower case as in torch's own lookup.

    Args:
        name: ``"RRFP"``, or a name that torch knows, such as ``"Interleaved1F1B"``.
        options: of `ScheduleRRFP`, where torchtitan gives none: ``functools.partial(schedule_class, split=True)``.
            Without effect on torch's classes.
    """
    if name.lower() == NAME.lower():
        return TitanSchedule.configured(**options) if options else TitanSchedule
    try:
        return get_schedule_class(name)
    except ValueError as error:
        raise ConfigError(
            f"pipeline_parallel_schedule is {name!r}, must be {NAME!r} or a schedule of torch: {error}"
        ) from None
