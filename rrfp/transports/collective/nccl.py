"""Groups over NCCL, between GPUs: a communicator of two ranks for each direction. NOT RUN on several GPUs.

A send or receive of NCCL is a kernel that holds a part of its GPU until the other end's runs. Nothing here waits for a
task between an announcement and both posts, so these kernels wait for no computation; and they are small, so that all
groups of a rank fit on its GPU beside the kernels of other libraries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.devices.base import CopyLane
from rrfp.devices.copies import DeviceCopies
from rrfp.errors import ConfigError
from rrfp.threads import start_thread
from rrfp.transports.collective.channel import RankPair
from rrfp.transports.wire.header_checks import TensorSpec
from rrfp.transports.wire.tensor_bytes import as_byte_tensor

#: Thread blocks that the kernel of one group may use. A GPU has about a hundred multiprocessors, a rank a few groups.
MAX_CTAS = 4

#: torch reads these when a group is made. 0: a failed transfer is reported by its work, and ends no process; nor does a
#: thread watch for groups that do not advance, which is what the base transport does.
_OF_OWN_GROUPS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

#: Hardware queues of a device; CUDA's own default.
_LEAST_QUEUES = 8

_making = threading.Lock()

_INSTEAD = "choose transport='auto', which copies tensors through host memory"


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse settings under which groups over NCCL can deadlock."""
    # Streams that share a hardware queue start their kernels in the order of launch: a receive blocks the computation
    # behind it. With one queue that is certain. A rank has a stream for its tasks, two for each of four edges (its own,
    # NCCL's), two for copies, one for reductions, those of libraries: with 8 queues some share one, which delays a
    # transfer until the one before it is done.
    queues = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", str(_LEAST_QUEUES))
    if not queues.strip().isdecimal() or int(queues) < _LEAST_QUEUES:
        raise ConfigError(
            f"environment variable CUDA_DEVICE_MAX_CONNECTIONS is {queues!r}, must be unset or at least "
            f"{_LEAST_QUEUES}, better 32, with transport collective: a receive would block the computation behind it; "
            f"else {_INSTEAD}"
        )
    # It serializes communicators in the order of the host's calls, which differs from rank to rank here.
    if environ.get("NCCL_LAUNCH_ORDER_IMPLICIT", "0") != "0":
        raise ConfigError(
            f"environment variable NCCL_LAUNCH_ORDER_IMPLICIT is {environ['NCCL_LAUNCH_ORDER_IMPLICIT']!r}, must be "
            f"unset or '0' with transport collective: ranks issue transfers in different orders; else {_INSTEAD}"
        )


class NcclGroup:
    """See `PairGroup`: on a stream of its own."""

    def __init__(self, group: Any, lane: CopyLane, *, is_source: bool) -> None:
        self.lane = lane
        self._group = group
        self._peer = 1 if is_source else 0
        self._begin = group.send if is_source else group.recv

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:  # complete, or free, so the stream waits for no other one
            # NCCL works on a stream of its own; `wait` makes the lane's wait for it, not the host.
            self._begin([as_byte_tensor(tensor)], self._peer, 0).wait()

    def abort(self) -> None:
        start_thread(self._group.abort, "rrfp-nccl-abort")  # it may hang where the other end does not abort


class NcclBackend:
    """See `Backend`."""

    def __init__(self, rank: int, device: torch.device, copies: DeviceCopies) -> None:
        check_environment(os.environ)
        self._rank = rank
        self._device = device
        self._copies = copies
        #: Nothing ever runs on it: memory that is allocated for it is free when the allocator says so.
        self._memory: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        return self._copies.holds(tensor)

    def empty(self, spec: TensorSpec) -> Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._memory):
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> NcclGroup:
        is_source = self._rank == pair.source
        group = _new_group(store, int(not is_source), self._device)
        return NcclGroup(group, self._copies.new_lane(f"rrfp-nccl-{pair}"), is_source=is_source)


def _new_group(store: Any, rank: int, device: torch.device) -> Any:
    from torch.distributed import distributed_c10d

    # Eager: a group that connects with its first transfer blocks the host in it.
    groups: Any = distributed_c10d.ProcessGroupNCCL
    options = groups.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=timeouts.TRANSFER_S)
    options.config.max_ctas = MAX_CTAS
    options.config.min_ctas = 1
    with _making, torch.cuda.device(device):
        before = {name: os.environ.pop(name, None) for name in _OF_OWN_GROUPS}
        os.environ.update(_OF_OWN_GROUPS)
        try:
            group = groups(store, rank, 2, options)
            group._set_sequence_number_for_group()
        finally:
            for name, value in before.items():
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})
    with torch.cuda.device(device):
        group.eager_connect_single_device(device)
    return group
