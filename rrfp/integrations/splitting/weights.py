"""The entries of a whole model: which are one tensor, and how a folder of the Hub has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from rrfp.compute.without_values import is_empty, note_empty, without_values
from rrfp.errors import ConfigError
from rrfp.integrations.splitting.hub_folder import Entry, HubFolder, first_of
from rrfp.log import get_logger
from rrfp.plain import shown

logger = get_logger(__name__)

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How entries of a model are made of those that a folder has."""

    #: The names of the entries of the model.
    makes: tuple[str, ...]
    #: The entries, by name.
    make: Callable[[Read], Mapping[str, Tensor]]
    #: The entry of the folder that it is, if it is one unchanged.
    unchanged: str | None = None

    @classmethod
    def copy(cls, name: str, stored: str) -> Recipe:
        return cls((name,), lambda read: {name: read(stored)}, stored)


class Weights:
    """What the parts of a model must know of the whole to load and save; it has no tensor.

    Here for modules whose entries a folder has under their names. Nothing is known of buffers that no folder has.
    """

    def __init__(self, model: nn.Module) -> None:
        entries = entries_of([model])
        self.shapes = {name: tensor.shape for name, tensor in entries.items()}
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in entries.items():
            by_tensor.setdefault(id(tensor), []).append(name)
        self._tied = {name: tuple(names) for names in by_tensor.values() for name in names if len(names) > 1}

    def tied(self, name: str) -> tuple[str, ...]:
        """All names of the entry; folders have the first."""
        return self._tied.get(name, (name,))

    def recipes(self, stored: Sequence[str], part: nn.Module) -> Iterator[Recipe]:
        """Those that the entries ``stored`` of a folder allow; ``part`` is any part of the model."""
        return (Recipe.copy(name, name) for name in stored if name in self.shapes)

    @property
    def stored_names(self) -> list[str]:
        """The entries that folders have, one name of each."""
        return [name for name in self.shapes if self.tied(name)[0] == name]

    def groups(self, names: Iterable[str], part: nn.Module) -> list[tuple[str, ...]]:
        """The entries ``names`` of a model in their order, those together of which one entry of a folder is made."""
        return [(name,) for name in names]

    def stored(self, entries: dict[str, Tensor], part: nn.Module) -> Mapping[str, Tensor]:
        """What a folder has for the entries of some groups, by its names."""
        return entries

    def write_configuration(self, folder: Path, part: nn.Module) -> None:
        """Write what a folder has beside the weights."""

    def fill_buffers(self, part: nn.Module) -> None:
        """Compute the buffers of ``part`` that `note_empty` has noted, as far as the model tells how."""


def entries_of(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The parameters and saved buffers, themselves, by name."""
    entries: dict[str, Tensor] = {}
    for module in modules:
        entries |= {
            name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
        }
    return entries


def load(
    parts: Sequence[nn.Module],
    weights: Weights,
    folder: str | os.PathLike[str],
    owner: str,
    where: torch.device | str | None,
) -> None:
    """Fill all parameters and buffers of ``parts``, called ``owner`` in errors, from a folder of the Hub.

    Tensors on the meta device get memory there. All stay the objects that they are, so ties are kept.
    """
    try:
        device = torch.device("cpu" if where is None else where)
    except (RuntimeError, TypeError):
        allowed = "'cpu', 'cuda', 'cuda:<index>' or a torch.device"
        raise ConfigError(f"device is {shown(where)}, must be {allowed}") from None
    wanted, stored = entries_of(parts), HubFolder(folder)
    recipes: dict[str, Recipe] = {}
    for recipe in weights.recipes(stored.names, parts[0]):
        recipes |= dict.fromkeys(recipe.makes, recipe)
    fillers = _fillers(wanted, weights, recipes)
    if lacking := [name for name in wanted if name not in fillers]:
        raise ConfigError(f"folder {str(stored.path)!r} lacks {first_of(lacking)}, must have all entries of {owner}")
    _check_ties(fillers.values(), weights, recipes, stored)
    targets = {name: wanted[entry] for entry, name in fillers.items()}
    needed = list({id(recipes[name]): recipes[name] for name in targets}.values())
    for name, tensor, entry in _copies(needed, targets, stored):
        _check(name, tensor, entry.shape, entry.dtype)
    for _, tensor, entry in _copies(needed, targets, stored):
        with _filling(tensor, device) as filled:
            entry.read_into(filled)
    for recipe in (each for each in needed if each.unchanged is None):
        for name, value in recipe.make(lambda source: stored.entry(source).read()).items():
            if name in targets:
                _check(name, targets[name], value.shape, value.dtype)
                with _filling(targets[name], device) as filled:
                    filled.copy_(value)
    compute_buffers(parts, weights, device)
    if left := [f"{name!r} of {type(part).__name__} {what}" for part in parts for name, what in without_values(part)]:
        more = f", as {len(left) - 1} more are" if len(left) > 1 else ""
        raise ConfigError(
            f"{left[0]}{more}: no folder has it, and its module does not tell how to compute it: build that module "
            "outside of torch.device('meta'), or give it the buffer, before the model is split"
        )


def compute_buffers(parts: Sequence[nn.Module], weights: Weights, device: torch.device) -> None:
    """Compute anew the buffers without values that no state has, as far as the model tells how."""
    for part in parts:
        for module in part.modules():
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = buffer = torch.empty_like(buffer, device=device)
                    note_empty([buffer])
        if any(map(is_empty, part.buffers())):
            weights.fill_buffers(part)


def _fillers(wanted: Iterable[str], weights: Weights, recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """For each entry the name under which recipes have it: its own, or that of an entry that is the same tensor."""
    found = {entry: next((name for name in weights.tied(entry) if name in recipes), None) for entry in wanted}
    return {entry: name for entry, name in found.items() if name is not None}


def _check_ties(names: Iterable[str], weights: Weights, recipes: Mapping[str, Recipe], stored: HubFolder) -> None:
    """Refuse two values of what is one tensor in the model: one of them would be lost."""
    for name in names:
        first = recipes[name].unchanged
        for other in weights.tied(name):
            second = recipes[other].unchanged if other in recipes else None
            if first and second and first != second and not stored.is_same(first, second):
                raise ConfigError(
                    f"folder {str(stored.path)!r} has two values of {name!r} and {other!r}, must have one: in the "
                    "model they are tied (tie_word_embeddings)"
                )


def _copies(
    recipes: Sequence[Recipe], targets: Mapping[str, Tensor], stored: HubFolder
) -> Iterator[tuple[str, Tensor, Entry]]:
    """Of recipes that change nothing: the name, the target and the entry."""
    for recipe in recipes:
        if recipe.unchanged is not None:
            (name,) = recipe.makes
            yield name, targets[name], stored.entry(recipe.unchanged)


@contextmanager
def _filling(tensor: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Where the values of ``tensor`` go: its own memory, or new memory that it has afterwards."""
    with torch.no_grad():
        if not tensor.is_meta:
            yield tensor
            increment_version(tensor)  # files are read into memory behind torch's back
            return
        filled = torch.empty_like(tensor, device=device)
        yield filled
    if isinstance(tensor, nn.Parameter):
        filled = nn.Parameter(filled, tensor.requires_grad)
    vars(filled).update(vars(tensor))
    # Not setattr on its module: the whole model, other parts and ties hold the same object.
    torch.utils.swap_tensors(tensor, filled)  # type: ignore[no-untyped-call]


def _check(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if isinstance(tensor, DTensor):
        raise ConfigError(f"{name!r} is a DTensor, must be a plain tensor: load the stage before it is sharded")
    if shape != tensor.shape:
        raise ConfigError(f"{name!r} is of shape {tuple(shape)} in the folder, must be {tuple(tensor.shape)}")
    if dtype != tensor.dtype and not (_is_ordinary(dtype) and _is_ordinary(tensor.dtype)):
        raise ConfigError(
            f"{name!r} is {dtype} in the folder, must be {tensor.dtype}: quantized weights are not supported"
        )


def _is_ordinary(dtype: torch.dtype) -> bool:
    """Whether values need no scale beside them."""
    return dtype.is_floating_point and dtype.itemsize > 1
