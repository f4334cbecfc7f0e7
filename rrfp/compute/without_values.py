"""What has no values yet in a module: tensors on the meta device, and buffers that ``to_empty`` has made.

No checkpoint has a buffer that is not persistent, such as the frequencies of rotary embeddings. ``to_empty`` leaves in
it whatever the memory held, and nothing else would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

#: Buffers that nothing has written since they were made, with torch's count of writes then.
_EMPTY: Any = WeakTensorKeyDictionary()


class NotesEmptyBuffers(nn.Module):
    """A module whose ``to_empty`` is noticed: a buffer that nothing writes afterwards is found by `without_values`."""

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> Self:
        super().to_empty(device=device, recurse=recurse)
        note_empty(self.buffers(recurse))
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        empty = [name for name, buffer in self.named_buffers() if is_empty(buffer)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        note_empty(self.get_buffer(name) for name in empty)  # moved to a device they are as empty
        return self


def note_empty(buffers: Iterable[Tensor]) -> None:
    for buffer in buffers:
        _EMPTY[buffer] = buffer._version


def is_empty(buffer: Tensor) -> bool:
    """Whether it was noted as without values, and nothing has written it since."""
    return bool(_EMPTY.get(buffer) == buffer._version)


def without_values(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The name of each tensor that has no values, and what is the matter with it."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            yield name, "is on the meta device"
        elif is_empty(tensor):
            yield name, "is a buffer from to_empty() that nothing has written"
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:
                yield f"{path}.{name}".lstrip("."), "is on the meta device"
