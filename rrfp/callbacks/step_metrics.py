"""The figures of a step by name: the columns of files, and the tags of TensorBoard."""

import math
from collections.abc import Callable

from rrfp.callbacks.base import StageFigures, StepEnded
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode

Tokens = float | Callable[[StepEnded], float] | None
"""The tokens of a microbatch, or a function that returns those of a step, over all replicas; None: not known."""

Metrics = dict[str, float | str | None]
"""Figures by name; None where there is none, such as a limit that is not set."""


def _share(part: str) -> Callable[[StageFigures], float]:
    return lambda stage: stage.breakdown.share(getattr(stage.breakdown, part))


#: By name: a figure of one stage. Parts of the step's time are 0..1.
_STAGE: dict[str, Callable[[StageFigures], float | None]] = {
    "compute": _share("compute"),
    "blocked": _share("blocking"),
    **{f"blocked_{cause.value}": _share(cause.value) for cause in WaitCause},
    "other": _share("other"),
    "held": lambda stage: stage.peaks.held,
    "held_limit": lambda stage: stage.slots,
    "held_bytes": lambda stage: stage.peaks.num_bytes,
    "held_bytes_limit": lambda stage: stage.byte_limit,
    "sent_bytes": lambda stage: stage.sent_bytes,
    "received_bytes": lambda stage: stage.received_bytes,
}

#: Figures of the whole step; the first four say which it is.
STEP_NAMES = ("time", "mode", "step", "completed", "microbatches", "loss", "seconds", "tokens_per_second")


def metric_names(stages: int) -> list[str]:
    """The names of all figures, in the order of `metrics`.

    Args:
        stages: N.

    Returns:
        Those of the step, then those of the stages: ``compute/stage0``, ``compute/stage1`` and so on.
    """
    return [*STEP_NAMES, *(f"{name}/stage{stage}" for name in _STAGE for stage in range(stages))]


def metrics(event: StepEnded, tokens: Tokens = None) -> Metrics:
    """The figures of a step or an evaluation.

    Args:
        event: from `rrfp.callbacks.Callback.step_ended` or ``evaluation_ended``.
        tokens: of each microbatch, or a function of ``event`` that returns those of the step, over all replicas; None
            leaves ``tokens_per_second`` empty.

    Returns:
        ``time`` (seconds since 1970), ``mode`` (``train`` or ``evaluation``), ``step``, ``completed``,
        ``microbatches``, ``loss``, ``seconds`` and ``tokens_per_second`` (while the step runs); then for each stage, as
        ``name/stage0``: the parts of the step's time, 0..1, ``compute``, ``blocked``, ``blocked_input``,
        ``blocked_memory``, ``blocked_order``, ``blocked_choice``, ``blocked_drained`` and ``other``; the most held,
        ``held`` (chunk tasks) and ``held_bytes``, with their limits ``held_limit`` and ``held_bytes_limit``; and the
        tensor bytes moved, ``sent_bytes`` and ``received_bytes``.
    """
    row: Metrics = {
        "time": event.time,
        "mode": "train" if event.mode is Mode.TRAIN else "evaluation",
        "step": event.step,
        "completed": event.completed,
        "microbatches": event.microbatches,
        "loss": event.loss,
        "seconds": event.seconds,
        "tokens_per_second": _tokens_per_second(event, tokens),
    }
    for name, value in _STAGE.items():
        row |= {f"{name}/stage{stage.stage}": value(stage) for stage in event.stages}
    return row


def _tokens_per_second(event: StepEnded, tokens: Tokens) -> float | None:
    if tokens is None or event.seconds <= 0:
        return None
    count = tokens(event) if callable(tokens) else tokens * event.microbatches * event.replicas
    return float(count) / event.seconds


def checked_tokens(tokens: Tokens) -> Tokens:
    """``tokens``, if it is a number above 0, a function or None."""
    is_number = isinstance(tokens, int | float) and not isinstance(tokens, bool) and 0 < tokens < math.inf
    if tokens is None or callable(tokens) or is_number:
        return tokens
    raise ConfigError(
        f"tokens is {tokens!r}, must be the tokens of a microbatch, a number above 0, a function of the step, or None"
    )
