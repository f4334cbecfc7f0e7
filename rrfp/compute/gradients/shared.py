"""One parameter object on several virtual stages of a process: a gradient for each of them.

autograd has one ``.grad`` for an object. Virtual stages would add to it in an order that depends on timing, and, from
the lanes of several stages, at the same time. So while a task of a virtual stage forms gradients, ``.grad`` is the
gradient of that virtual stage. At all other times it is the gradient of the *home*: the lowest virtual stage that has
the object. The object is a *guest* on its other virtual stages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


class SharedGradients:
    """The gradients of all shared parameters of a process."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        holders: dict[int, tuple[nn.Parameter, list[int]]] = {}
        for v, module in sorted(modules.items()):
            for parameter in module.parameters():
                holders.setdefault(id(parameter), (parameter, []))[1].append(v)
        #: Each shared parameter with its virtual stages, ascending; the first is its home.
        self.holders = [(parameter, tuple(stages)) for parameter, stages in holders.values() if len(stages) > 1]
        #: The guests of each virtual stage that has a shared parameter, and their gradients.
        self._guests: dict[int, dict[nn.Parameter, Tensor | None]] = {
            v: {} for _, stages in self.holders for v in stages
        }
        for parameter, (_, *others) in self.holders:
            for v in others:
                self._guests[v][parameter] = None
        self._turn = threading.Lock()

    def is_home(self, parameter: nn.Parameter, virtual_stage: int) -> bool:
        """Whether ``.grad`` is the gradient of this virtual stage outside `swapped_in`."""
        return parameter not in self._guests.get(virtual_stage, ())

    def swapped_in(self, virtual_stage: int) -> AbstractContextManager[None]:
        """Within, ``.grad`` is that of ``virtual_stage``, on one thread at a time."""
        guests = self._guests.get(virtual_stage)
        return nullcontext() if guests is None else self._swapped_in(guests)

    @contextmanager
    def _swapped_in(self, guests: dict[nn.Parameter, Tensor | None]) -> Iterator[None]:
        with self._turn:
            at_home = {parameter: parameter.grad for parameter in guests}
            for parameter, gradient in guests.items():
                parameter.grad = gradient
            try:
                yield
            finally:
                for parameter, gradient in at_home.items():
                    guests[parameter] = parameter.grad
                    parameter.grad = gradient

    def guests_of(self, home: int) -> tuple[int, ...]:
        return tuple(sorted({v for _, stages in self.holders if stages[0] == home for v in stages[1:]}))

    def homes_of(self, guest: int) -> tuple[int, ...]:
        return tuple(sorted({stages[0] for _, stages in self.holders if guest in stages[1:]}))

    @torch.no_grad()
    def gather(self, home: int) -> None:
        """Add the gradients of guests to those at ``home``, in order."""
        for parameter, (first, *others) in self.holders:
            if first != home:
                continue
            for v in others:
                with self.swapped_in(v):
                    gradient = _pop_gradient(parameter)
                with self.swapped_in(home):
                    if gradient is None:
                        continue
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _pop_gradient(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    parameter.grad = None
    return gradient
