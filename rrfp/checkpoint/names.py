"""Names of the whole model for what one rank holds: its parameters, buffers and the state of their optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.stages import Split, SplitStage

#: Modules by their names in the whole model, ``{"layers.4": block}``, where "" adds nothing to a module's own names.
#: Modules of a list have one name, and tell themselves apart by their own names.
ByName = Mapping[str, nn.Module | Sequence[nn.Module]]

#: A rank's part of the model: a module or several; a stage of `rrfp.split`, or all of them; or modules by name, as a
#: stage of a graph has them by part; or a list of these, for all stages.
Modules = nn.Module | Sequence[nn.Module | ByName] | SplitStage | Split | ByName

#: What steps the rank's parameters.
Optimizers = Optimizer | Sequence[Optimizer] | None

_ALLOWED = "a module, a list of them, a stage of rrfp.split, or a dict {name in the whole model, or part: module}"


def named_modules(modules: Modules) -> list[tuple[str, nn.Module]]:
    """The prefix of its names and the module, for each module of this process."""
    each: Iterable[Any]
    given: Any = modules  # also what no caller should pass
    if isinstance(modules, SplitStage):
        each = modules.chunks
    elif isinstance(modules, Split):
        each = [module for stage in modules for module in stage.chunks]
    else:
        each = given if isinstance(given, Sequence) else [given]
    named: list[tuple[str, nn.Module]] = []
    for item in each:
        named += _by_name(item) if isinstance(item, Mapping) else [("", item)]
    for _, module in named:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules has a value of type {type(module).__name__}, must be {_ALLOWED}")
    return named


def _by_name(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, own in modules.items():
        prefix = f"{name}." if name else ""
        yield from ((prefix, module) for module in (own if isinstance(own, list | tuple) else [own]))


def model_entries(modules: Modules) -> dict[str, Any]:
    """The entries of ``state_dict`` of all modules, under the whole model's names."""
    entries: dict[str, Any] = {}
    for prefix, module in named_modules(modules):
        for name, value in module.state_dict(prefix=prefix).items():
            if name in entries and not _is_same(entries[name], value):
                raise collision(name, "two modules of this process")
            entries.setdefault(name, value)
    return entries


def state_names(modules: Modules) -> set[str]:
    """The names of `model_entries` that are no parameter's: those of buffers and extra state."""
    parameters = {name for names in parameter_names(modules).values() for name in names}
    return set(model_entries(modules)) - parameters


def collision(name: str, places: str) -> ConfigError:
    return ConfigError(
        f"modules: {places} have the name {name!r} for different values, must have the whole model's names: pass "
        "modules={'layers.4': block, ...}, with the name of each module in the whole model, which in a part of a graph "
        "may be 'vision.layers.4'"
    )


def load_model(modules: Modules, entries: Mapping[str, Any]) -> None:
    """Load the modules from ``entries``, which have all of their names."""
    for prefix, module in named_modules(modules):
        names = module.state_dict(prefix=prefix)
        module.load_state_dict({name.removeprefix(prefix): entries[name] for name in names})


def optimizers_of(optimizers: Optimizers) -> list[Optimizer]:
    if optimizers is None:
        return []
    each: list[Any] = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in each:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer is of type {type(optimizer).__name__}, must be a torch.optim.Optimizer or a list"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer is LBFGS, whose state is of all its parameters at once, must be one with state by "
                "parameter: pass None, and on the same layout its state_dict() in extra"
            )
    return each


def parameter_names(modules: Modules) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for prefix, module in named_modules(modules):
        for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            known = names.setdefault(id(parameter), [])
            if name not in known:
                known.append(name)
    return names


def optimizer_entries(modules: Modules, optimizers: Optimizers) -> dict[str, Any]:
    """State and hyperparameters by parameter, in the flattened form of ``torch.distributed.checkpoint.state_dict``."""
    names, entries = parameter_names(modules), {}
    for optimizer in optimizers_of(optimizers):
        for group, parameter in grouped(optimizer):
            for name in names_of(parameter, names):
                for key, value in optimizer.state.get(parameter, {}).items():
                    entries[f"state.{name}.{key}"] = value
                for key, value in group.items():
                    if key not in ("params", "param_names"):
                        entries[f"param_groups.{name}.{key}"] = value
    return entries


def grouped(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each parameter with its group, in the order of ``Optimizer.state_dict``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def names_of(parameter: Tensor, names: Mapping[int, list[str]]) -> list[str]:
    if id(parameter) not in names:
        shape = tuple(parameter.shape)
        raise ConfigError(f"optimizer has a parameter of shape {shape} that is in none of modules: must be of them")
    return names[id(parameter)]


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.data_ptr() == other.data_ptr() and value.shape == other.shape:
            return True
        return value.shape == other.shape and value.dtype == other.dtype and torch.equal(value, other)
    return bool(value == other)
