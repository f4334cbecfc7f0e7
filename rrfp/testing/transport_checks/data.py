"""Checks of the data in messages: every kind of tensor arrives unchanged, in its own memory."""

from __future__ import annotations

import asyncio

import torch

from rrfp.model.tasks import Kind, Task
from rrfp.testing.transport_checks.pair import (
    STEP,
    MakePair,
    Pair,
    PairOptions,
    assert_same,
    data,
    index_of,
    pass_on,
    receive,
    running,
    soon,
)
from rrfp.transports.base import Channel, Message, MessageKind, Plain
from rrfp.transports.wire.tensor_bytes import ALIGNMENT, DTYPES

_MIB = 1 << 20


async def check_every_field_arrives(make_pair: MakePair) -> None:
    """Channel, kind, step, task and body arrive, with the sender's stage and a sequence number."""
    body: dict[str, Plain] = {
        "text": "ü",
        "none": None,
        "flag": True,
        "real": 0.5,
        "raw": b"\0",
        "list": [1, {"deep": -1}],
    }
    sent = [
        Message(channel, kind, step, task, (), body)
        for channel in Channel
        for kind in MessageKind
        for step, task in ((STEP, Task(Kind.W, 7, 2)), (None, None))
    ]
    async with make_pair(PairOptions()) as pair:
        counts = dict.fromkeys(Channel, 0)
        for message in sent:
            received = await pass_on(pair, message)
            for field in ("channel", "kind", "step", "task"):
                got, want = getattr(received, field), getattr(message, field)
                assert (got, type(got)) == (want, type(want)), f"{field}: sent {want!r}, received {got!r}"
            assert dict(received.body) == body, f"body: sent {body!r}, received {received.body!r}"
            assert received.sender == 0, f"sender: is {received.sender}, must be 0"
            count = counts[message.channel]
            assert received.sequence == count, f"sequence: is {received.sequence}, must be {count}"
            counts[message.channel] += 1


async def check_every_dtype(make_pair: MakePair) -> None:
    """Every dtype that torch can send arrives bit by bit, NaNs and denormals included."""
    generator = torch.Generator().manual_seed(0)
    async with make_pair(PairOptions()) as pair:
        for name, dtype in DTYPES.items():
            high = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, high, (6 * 4 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tensor = raw.view(dtype).view(6, 4)
            received = await pass_on(pair, data(tensor))
            assert_same(received.tensors[0], tensor, name)


async def check_zero_size_and_zero_dimensions(make_pair: MakePair) -> None:
    """Empty tensors and scalars arrive, alone, together and beside others."""
    tensors = (
        torch.empty(0),
        torch.tensor(3.5),
        torch.empty(4, 0, 2, dtype=torch.int64),
        torch.tensor(True),
        torch.arange(5),
        torch.empty(0, 1 << 40, dtype=torch.uint8),
    )
    async with make_pair(PairOptions()) as pair:
        for chosen in (tensors, tensors[:1], tensors[1:2], ()):
            received = await pass_on(pair, data(*chosen))
            assert len(received.tensors) == len(chosen), f"sent {len(chosen)} tensors, received {len(received.tensors)}"
            for index, (got, want) in enumerate(zip(received.tensors, chosen, strict=True)):
                assert_same(got, want, f"tensor {index}")


async def check_memory_layouts(make_pair: MakePair) -> None:
    """Transposed, strided, expanded, offset, conjugated and negated tensors arrive dense and equal."""
    base = torch.randn(24, 36)
    pair_of_reals = torch.randn(8, 8, dtype=torch.complex64)
    layouts = {
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "flipped": base.flip(0),
        "expanded": base[:, :1].expand(24, 5),
        "offset": base.reshape(-1)[1:40],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": pair_of_reals.conj().t(),
        "negated": pair_of_reals.conj().imag,
        "large transposed": torch.randn(1024, 600).t(),
    }
    async with make_pair(PairOptions()) as pair:
        for name, tensor in layouts.items():
            assert_same((await pass_on(pair, data(tensor))).tensors[0], tensor, name)


async def check_requires_grad_and_null_gradients(make_pair: MakePair) -> None:
    """requires_grad travels, a graph does not, and None stands for "no gradient"."""
    leaf = torch.randn(3, requires_grad=True)
    tensors = (None, leaf, leaf * 2, torch.randn(2), None, torch.nn.Parameter(torch.randn(2, 2)), None)
    async with make_pair(PairOptions()) as pair:
        for channel in (Channel.FORWARD, Channel.BACKWARD):
            received = await pass_on(pair, data(*tensors, channel=channel))
            for index, (got, want) in enumerate(zip(received.tensors, tensors, strict=True)):
                assert_same(got, want, f"tensor {index}")
        received = await pass_on(pair, data(None))
        assert received.tensors == (None,), f"sent one None, received {received.tensors!r}"


async def check_received_memory_is_its_own(make_pair: MakePair) -> None:
    """Once send returned, the sender may write to its tensor; received tensors never share memory, and are aligned."""
    async with make_pair(PairOptions()) as pair:
        for count in (8, 20_000, 3 * _MIB):
            tensor = torch.arange(count, dtype=torch.int32)
            want = tensor.clone()
            async with running(_receive_two(pair)) as receiving:
                await soon(pair.left.send(1, data(tensor, index=0)), "send returns")
                tensor.fill_(-1)
                await soon(pair.left.send(1, data(tensor, index=1)), "send returns")
                first, second = await soon(receiving, "both messages arrive")
            assert_same(first.tensors[0], want, f"{count} numbers, overwritten after send returned")
            assert_same(second.tensors[0], tensor, f"{count} numbers, the overwritten ones")
            for message in (first, second):
                address = message.tensors[0].data_ptr() if message.tensors[0] is not None else 0
                assert address % ALIGNMENT == 0, f"a tensor of {count} numbers is not aligned to {ALIGNMENT} bytes"


async def _receive_two(pair: Pair) -> tuple[Message, Message]:
    return await receive(pair.right), await receive(pair.right)


async def check_large_tensor(make_pair: MakePair) -> None:
    """A 64 MiB tensor and the tensors beside it arrive; the loop runs many times meanwhile."""
    big = torch.arange(16 * _MIB, dtype=torch.int32)
    odd = torch.arange(5 * _MIB + 3, dtype=torch.uint8)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with make_pair(PairOptions()) as pair, running(count_turns()):
        turns = 0
        received = await pass_on(pair, data(torch.ones(3), big, None, odd, torch.empty(0), index=1))
        assert turns >= 16, f"the loop ran only {turns} times while 64 MiB were moved"
        for index, want in enumerate((torch.ones(3), big, None, odd, torch.empty(0))):
            assert_same(received.tensors[index], want, f"tensor {index}")
        assert index_of(await pass_on(pair, data(torch.ones(2), index=2))) == 2, "the next message is another one"
