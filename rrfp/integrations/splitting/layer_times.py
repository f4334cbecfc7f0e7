"""How long the layers of a model take, measured on a batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.integrations.splitting.cuts import LayerCosts
from rrfp.integrations.splitting.layered import Layered, Sample, evaluating, tensors_of

#: Each layer runs so often; the shortest time counts.
REPEATS = 3


def measure(layered: Layered, sample: Sample) -> LayerCosts:
    """Seconds of a forward and a backward of each layer, in eval mode. No ``.grad`` is written."""
    with torch.random.fork_rng(), evaluating(layered.model):
        calls = _calls(layered, sample)

        def seconds(modules: Sequence[nn.Module]) -> float:
            return sum(_seconds(module, *calls[module]) for module in modules if module in calls)

        return LayerCosts(
            seconds(layered.before), [seconds([layer]) for layer in layered.layers], seconds(layered.after)
        )


#: By module, the positional and keyword arguments of its first call.
_Calls = dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]


def _calls(layered: Layered, sample: Sample) -> _Calls:
    calls: _Calls = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    with ExitStack() as stack, torch.no_grad():
        for module in {*layered.before, *layered.layers, *layered.after}:
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        layered.run(sample)
    return calls


def _seconds(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    args = tuple(_learning(value) for value in args)
    kwargs = {name: _learning(value) for name, value in kwargs.items()}
    wanted = [tensor for tensor in (*tensors_of((args, kwargs)), *module.parameters()) if tensor.requires_grad]
    times = []
    with torch.enable_grad():
        for _ in range(REPEATS):
            with _timed(wanted) as taken:
                outputs = [tensor for tensor in tensors_of(module(*args, **kwargs)) if tensor.requires_grad]
                if outputs:
                    ones = [torch.ones_like(tensor) for tensor in outputs]
                    torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
            times += taken
    return min(times)


def _learning(value: Any) -> Any:
    """A floating tensor as a leaf whose gradient is formed; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


@contextmanager
def _timed(tensors: Sequence[Tensor]) -> Iterator[list[float]]:
    taken: list[float] = []
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield taken
    for device in devices:
        torch.cuda.synchronize(device)
    taken.append(time.perf_counter() - start)
