"""Tensors as plain bytes and back, with no copy where memory allows it.

Knows no message and no socket. The one rule: memory passed to `from_buffer` belongs to the tensor from then on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rrfp.devices.copies import DeviceCopies
from rrfp.errors import ConfigError

#: Alignment of a received tensor's memory in bytes: a cache line, and the widest vector load.
ALIGNMENT = 64

#: torch copies numbers up to this size, in bytes, from any address.
_WORD_BYTES = 8

#: numpy's limit; torch itself allows more.
MAX_DIMENSIONS = 64

_NAMES_IN_NUMPY = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NAMES = (
    *(*_NAMES_IN_NUMPY, "bfloat16", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

#: Every dtype that can be sent, by its name on the wire; only those that this torch has.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}

#: numpy's dtype of the same size; the same dtype where numpy has it.
_IN_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: np.dtype(name if name in _NAMES_IN_NUMPY else f"i{dtype.itemsize}") for name, dtype in DTYPES.items()
}

#: Those whose numpy arrays Python can view as plain bytes.
_CASTABLE = frozenset(DTYPES[name] for name in _NAMES_IN_NUMPY if not DTYPES[name].is_complex)

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def check_sendable(tensor: Tensor, copies: DeviceCopies | None = None) -> None:
    """Refuse a tensor whose bytes cannot be sent as they are.

    Args:
        tensor: the tensor.
        copies: of the rank's device, where its tensors can be sent too.

    Raises:
        ConfigError: for a device that is neither the CPU nor the rank's, a sparse or nested layout, or a dtype outside
            `DTYPES`.
    """
    if not tensor.is_cpu and (copies is None or not copies.holds(tensor)):
        raise ConfigError(
            f"tensor is on {tensor.device}, must be on the CPU or on the rank's device: pass device=, or move the "
            "rank's modules to their device before the pipeline is built"
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(f"tensor layout is {tensor.layout}, must be: torch.strided")
    if tensor.dtype not in DTYPE_NAMES:
        raise ConfigError(f"tensor dtype is {tensor.dtype}, must be one of: {', '.join(DTYPES)}")
    if tensor.dim() > MAX_DIMENSIONS:
        raise ConfigError(f"tensor has {tensor.dim()} dimensions, must have at most {MAX_DIMENSIONS}")


def as_bytes(tensor: Tensor) -> memoryview:
    """The dense bytes of ``tensor``: a view of its memory where it is contiguous, a copy otherwise.

    The copy is made on the calling thread; make large tensors contiguous where they are computed.

    Args:
        tensor: a dense CPU tensor.

    Raises:
        ConfigError: as `check_sendable`.
    """
    check_sendable(tensor)
    # Every call into torch costs as much as sending a small message's bytes: mostly this one is enough.
    if tensor.dtype in _CASTABLE:
        array: Any = tensor.numpy(force=True)
        view = memoryview(array)
        if view.c_contiguous and view.nbytes:
            return view.cast("B")
    array = as_byte_tensor(tensor).numpy()
    return memoryview(array)


def as_byte_tensor(tensor: Tensor) -> Tensor:
    """The dense bytes of ``tensor`` on its device: a view, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def allocate(num_bytes: int) -> memoryview:
    """Fresh writable memory aligned to 64 bytes, not initialised.

    Args:
        num_bytes: its size.
    """
    array: Any = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
    return memoryview(array)


def copied_from(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], *, requires_grad: bool) -> Tensor:
    """A leaf tensor with a copy of ``buffer``; otherwise as `from_buffer`."""
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu").requires_grad_(requires_grad)
    tensor = _cloned(buffer, dtype, shape)
    return tensor.requires_grad_() if requires_grad else tensor


def from_buffer(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], *, requires_grad: bool) -> Tensor:
    """A leaf tensor over ``buffer``, which it keeps alive; over a copy where the memory is unaligned or read-only.

    Args:
        buffer: contiguous, exactly the tensor's bytes. It belongs to the tensor from now on.
        dtype: one of `DTYPES`.
        shape: of the tensor.
        requires_grad: only for floating and complex dtypes.
    """
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu").requires_grad_(requires_grad)
    if buffer.readonly:  # torch warns about memory that it must not write to
        buffer = _copy(buffer)
    tensor = _over(buffer, dtype, shape)
    if tensor.data_ptr() % ALIGNMENT:
        tensor = _cloned(buffer, dtype, shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _over(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A leaf over ``buffer``, and no view of another tensor."""
    # Not by np.ndarray, which would keep the memory alive but not the view, whose end means that it may be used again.
    tensor = torch.from_numpy(np.frombuffer(buffer, _IN_NUMPY[dtype]).reshape(shape))
    return tensor if tensor.dtype is dtype else tensor.view(dtype).detach()


def _cloned(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """As `_over`, with aligned memory of its own."""
    # torch's copy of wider numbers is a segmentation fault where they are not aligned.
    if dtype.itemsize > _WORD_BYTES:
        return _over(_copy(buffer), dtype, shape)
    return _over(buffer, dtype, shape).clone()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` into ``target``, plain bytes of one length. Other threads run meanwhile."""
    # numpy releases the GIL while it copies; an assignment to a memoryview does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _copy(buffer: memoryview) -> memoryview:
    copy = allocate(buffer.nbytes)
    copy_bytes(copy, buffer.cast("B"))
    return copy
