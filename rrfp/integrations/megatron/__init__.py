"""RRFP for users of Megatron-core: its pipelined ``forward_backward_func``, run by readiness.

    import rrfp.integrations.megatron as rm

    rm.enable()     # anywhere before training starts, before or after the trainer imports Megatron

`enable` puts `MegatronSchedule` in the place of Megatron's two pipelined schedules, so that trainers get it from
``get_forward_backward_func()``; `disable` takes it out again. `forward_backward_func` makes one to be passed on. Where
no script can be edited, the environment variable ``RRFP_MEGATRON`` does what `enable` does.

Megatron is imported when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rrfp import Limit

if TYPE_CHECKING:
    from rrfp.integrations.megatron.schedule import MegatronSchedule

__all__ = ["disable", "enable", "forward_backward_func"]

#: What `enable` has put in place, and what stood there, by name.
_enabled: MegatronSchedule | None = None
_replaced: dict[str, Any] = {}


def forward_backward_func(
    *, limit: Limit | int | str = "megatron", pg_collection: Any = None, **options: Any
) -> MegatronSchedule:
    """A function that takes the arguments of Megatron's ``forward_backward_func``.

    Args:
        limit: as of `enable`.
        pg_collection: the process groups of calls that pass none; by default those of ``parallel_state``.
        options: as of `enable`.

    Returns:
        The function, to be passed to ``train_step`` and the like. Its ``last_result`` says where the time of the last
        call went, its ``close`` leaves the pipelines.

    Raises:
        ConfigError: as `enable`.
    """
    from rrfp.integrations.megatron.schedule import MegatronSchedule

    return MegatronSchedule(limit=limit, pg_collection=pg_collection, **options)


def enable(*, limit: Limit | int | str = "megatron", **options: Any) -> MegatronSchedule:
    """Let Megatron's ``get_forward_backward_func()`` return RRFP where it would return a pipelined schedule.

    It may be called before or after a trainer has imported ``get_forward_backward_func``, and again, with other
    options. Without pipeline parallelism Megatron's own function runs as before.

    Args:
        limit: how many microbatches a stage may hold: ``"megatron"``, as many as Megatron's own schedule does, or as
            `rrfp.Pipeline` takes it; ``"2n"`` where memory allows.
        options: of `rrfp.Pipeline`, such as ``hint``, ``transport``, ``callbacks`` or ``stall_after``. Not those that
            Megatron decides, such as ``split``, ``chunks`` or ``loss_fn``.

    Returns:
        What was put in place.

    Raises:
        ConfigError: where megatron-core is missing or of a version that RRFP cannot call, or for an option that does
            not fit.
    """
    global _enabled
    made = forward_backward_func(limit=limit, **options)
    from rrfp.integrations.megatron.upstream import PIPELINED, schedules

    disable()
    for name in PIPELINED:
        _replaced[name] = getattr(schedules, name)
        setattr(schedules, name, made)
    _enabled = made
    return made


def disable() -> None:
    """Put Megatron's own schedules back, and leave the pipelines of what `enable` returned.

    All ranks must call it alike. Without `enable` it does nothing.
    """
    global _enabled
    if _enabled is None:
        return
    from rrfp.integrations.megatron.upstream import schedules

    made, _enabled = _enabled, None
    for name, own in _replaced.items():
        if getattr(schedules, name) is made:
            setattr(schedules, name, own)
    _replaced.clear()
    made.close()
