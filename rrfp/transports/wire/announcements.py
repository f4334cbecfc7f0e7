"""Checked headers of messages, and the memory for those of their fields that repeat from message to message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
from torch import Tensor

from rrfp.errors import FrameError
from rrfp.model.tasks import StepId, Task
from rrfp.transports.base import Channel, Message, MessageKind
from rrfp.transports.wire.header_checks import HeaderChecks, TensorSpec
from rrfp.transports.wire.tensor_bytes import copied_from, from_buffer

#: Headers of which the checked fields are kept: of a few steps and shapes; then they are forgotten.
_MAX_KNOWN = 64

#: Longer ones are checked each time: kept, thousands of tensors would take up to fifteen times their header.
_MAX_KNOWN_BYTES = 4096


class CheckedFields(NamedTuple):
    """The fields of a header that repeat from message to message, checked; see `Announcement`."""

    channel: Channel
    kind: MessageKind
    step: StepId | None
    specs: tuple[TensorSpec | None, ...]
    sizes: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class Announcement:
    """A checked message header.

    Attributes:
        sender: the rank that sent it.
        channel: the message's FIFO.
        sequence: its number in that FIFO.
        kind: see `Message`.
        step: see `Message`.
        task: see `Message`.
        body: see `Message`.
        specs: of the tensors; None stands for "no gradient".
        sizes: bytes of each frame that follows, in order; tensors that are None have no frame.
        num_bytes: of all frames.
    """

    sender: int
    channel: Channel
    sequence: int
    kind: MessageKind
    step: StepId | None
    task: Task | None
    body: Mapping[str, Any]
    specs: tuple[TensorSpec | None, ...]
    sizes: tuple[int, ...]
    num_bytes: int

    def assemble(self, buffers: Sequence[memoryview], *, copy: bool = False) -> Message:
        """The whole message. Aligned writable buffers become the tensors' memory, others are copied once.

        Args:
            buffers: one for each of `sizes`.
            copy: copy all buffers, which must be writable: their memory is used again.

        Raises:
            FrameError: if the number of buffers, or the length of one, differs from the announced, or if torch cannot
                make tensors of them, as for lack of memory.
        """
        sender, sizes = self.sender, self.sizes
        if len(buffers) != len(sizes):
            raise FrameError(sender, "frames", f"{len(buffers)} frames follow the header, must be {len(sizes)}")
        try:
            tensors = self._tensors(buffers, copied_from if copy else from_buffer)
        except FrameError:
            raise
        except Exception as error:  # else the loop would log it, and the step would wait for the message forever
            raise FrameError(sender, "frames", f"cannot become tensors: {type(error).__name__}: {error}") from error
        return Message(self.channel, self.kind, self.step, self.task, tuple(tensors), self.body, self.sequence, sender)

    def _tensors(self, buffers: Sequence[memoryview], tensor_of: Callable[..., Tensor]) -> list[Tensor | None]:
        sender, sizes = self.sender, self.sizes
        tensors, index = list[Tensor | None](), 0
        for spec in self.specs:
            if spec is None:
                tensors.append(None)
                continue
            dtype, shape, requires_grad = spec
            if (buffer := buffers[index]).nbytes != sizes[index]:
                raise FrameError(sender, f"frames[{index}]", f"has {buffer.nbytes} bytes, must have {sizes[index]}")
            tensors.append(tensor_of(buffer, dtype, shape, requires_grad=requires_grad))
            index += 1
        return tensors


class KnownHeaders:
    """Checks the fields that repeat, once for each set of values."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._packer = msgpack.Packer()
        self._known: dict[bytes, CheckedFields] = {}

    def check(self, check: HeaderChecks, kind: str, channel: Any, step: Any, tensors: Any) -> CheckedFields:
        """The checked fields; ``check`` raises for one that is wrong."""
        # The bytes as the key, not the values: True == 1 == 1.0 in Python, but only one of them passes the checks.
        try:
            key: bytes = self._packer.pack((kind, channel, step, tensors))
        except ValueError:
            check.fail("header", "is nested too deep")
        if (known := self._known.get(key)) is not None:
            return known
        specs = check.tensors(tensors)
        sizes = tuple([spec.num_bytes for spec in specs if spec is not None])
        if (num_bytes := sum(sizes)) > self._max_bytes:
            check.fail("tensors", f"have {num_bytes} bytes, max_message_bytes is {self._max_bytes}")
        checked = CheckedFields(
            check.choice("channel", channel, Channel),
            check.choice("kind", kind, MessageKind),
            check.step(step),
            specs,
            sizes,
            num_bytes,
        )
        if len(key) <= _MAX_KNOWN_BYTES:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = checked
        return checked
