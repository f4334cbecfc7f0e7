"""A whole model on a rank that holds one stage of it: all else is on the meta device, where it takes no memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def forget_others(model: nn.Module, chunks: Iterable[nn.Module]) -> None:
    """Move parameters and saved buffers of ``model`` that no chunk has to the meta device; no optimizer steps them."""
    own = {id(value) for chunk in chunks for value in chunk.state_dict(keep_vars=True).values()}
    moved: dict[int, Tensor] = {}  # a tied parameter stays one
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in own:
            continue
        if id(value) not in moved:
            meta = value.detach().to("meta")
            moved[id(value)] = nn.Parameter(meta, False) if isinstance(value, nn.Parameter) else meta
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, moved[id(value)])


def whole_state_dict(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor] | None:
    """The state dict of the whole model, on the CPU of rank 0; None on the others.

    One tensor after the other is sent, so no rank needs memory for more than the model.

    Args:
        model: on each rank, without what other ranks hold: see `forget_others`.
        group: of all ranks, for tensors on the CPU.
    """
    state, rank = model.state_dict(), dist.get_rank(group)
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, {name for name, value in state.items() if not value.is_meta}, group=group)
    whole = dict[str, Tensor]()
    for name, value in state.items():
        source = next(rank for rank, names in enumerate(held) if name in names)
        if rank == source:
            whole[name] = value.cpu().contiguous()
            if source != 0:
                dist.send(whole.pop(name), 0, group)
        elif rank == 0:
            whole[name] = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(whole[name], source, group)
    return whole if rank == 0 else None
