"""`rrfp.merge_state_dict`: the state dicts of a model's parts into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.stages import METADATA


def merge_state_dict(states: Iterable[Mapping[str, Any]], model: nn.Module | None = None) -> dict[str, Any]:
    """The state dict of the whole model from those of its parts, for ``save_pretrained(..., state_dict=)``.

    Those of stages, also as ``torch.save`` has written them, say which stages there are; so one that is missing is
    noticed. Those that other ways of saving have written, and those of single modules, do not: pass ``model``.

    Args:
        states: ``stage.state_dict()`` of every stage, or ``module.state_dict()`` of every part.
        model: the whole model, whose names the result must have; it may be on the meta device.

    Returns:
        All entries, under their names. An entry that several parts have must be the same in all.

    Raises:
        ConfigError: if ``states`` is no list of state dicts, lacks a stage or an entry of ``model``, is of several
            splits, or has two values of one name.
    """
    parts = _checked(states)
    _check_complete(parts)
    merged: dict[str, Any] = {}
    for state in parts:
        for name, value in state.items():
            if name in merged and not _equal(merged[name], value):
                raise ConfigError(f"states have two values of {name!r}, must have one: are the parts of one model?")
            merged.setdefault(name, value)
    if model is not None and (different := model.state_dict().keys() ^ merged.keys()):
        name = min(different)
        problem = f"have {name!r}, which model lacks" if name in merged else f"lack {name!r}"
        raise ConfigError(f"states {problem}, must have all entries of model and no others")
    return merged


def _checked(states: Any) -> list[Mapping[str, Any]]:
    """The state dicts, which may come from an iterator."""
    wanted = "must be a list of state dicts, one of each stage"
    if isinstance(states, Mapping | str) or not isinstance(states, Iterable):
        raise ConfigError(f"states is a {type(states).__name__}, {wanted}")
    parts = list(states)
    for index, state in enumerate(parts):
        if not isinstance(state, Mapping):
            raise ConfigError(f"states[{index}] is a {type(state).__name__}, {wanted}: load files first")
    if not parts:
        raise ConfigError(f"states is empty, {wanted}")
    return parts


def _check_complete(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigError for stages of several splits, and for a stage that is missing if all say which they are."""
    marks = [(getattr(part, "_metadata", None) or {}).get(METADATA) for part in parts]
    known = [mark for mark in marks if mark is not None]
    splits = list(dict.fromkeys(f"{mark['partition']}, {mark['stages']} stages" for mark in known))
    if len(splits) > 1:
        raise ConfigError(f"states are of {splits[0]!r} and of {splits[1]!r}, must be of one split")
    if known and len(known) == len(marks):
        stages = known[0]["stages"]
        if missing := sorted({*range(stages)} - {mark["stage"] for mark in known}):
            raise ConfigError(f"states lack stage {missing[0]}, must have all stages of the model, 0..{stages - 1}")


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value is other or torch.equal(value, other)
    return bool(value == other)
