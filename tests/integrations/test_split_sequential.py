"""`rrfp.split` of an ``nn.Sequential`` and of lists of blocks, which needs no other library."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fork_server import fork_server, printed, reports
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rrfp
from rrfp.transports.rendezvous import LocalRendezvous

__all__ = ["fork_server"]

WIDTH = 6


class Pair(nn.Module):
    """Two tensors in one tuple, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, pair: tuple[Tensor, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        value, other = pair if isinstance(pair, tuple) else (pair, pair)
        return torch.tanh(self.linear(value)) + other, other * 2


class Last(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def blocks() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [*(Pair() for _ in range(4)), Last()]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


INPUTS = [torch.arange(3.0 * WIDTH, dtype=torch.float64).reshape(3, WIDTH).sin() * (m + 1) for m in range(3)]
TARGETS = [each.cos() for each in INPUTS]


@pytest.mark.parametrize("container", [nn.Sequential, list, tuple, nn.ModuleList])
def test_gradients_and_names_are_the_chains(container: Any) -> None:
    whole, model = nn.Sequential(*blocks()), blocks()
    chain = nn.Sequential(*model) if container is nn.Sequential else container(model)
    parts = rrfp.split(chain, 2, cuts=[2], check=True, sample=INPUTS[0])
    with parts.local(loss_fn=loss_fn, deterministic=True).blocking() as pipe:
        result = pipe.step(INPUTS, TARGETS)
    losses = [loss_fn(whole(each), target) for each, target in zip(INPUTS, TARGETS, strict=True)]
    for loss in losses:
        torch.autograd.backward(loss / 3)
    assert list(result.losses) == [loss.item() for loss in losses]
    gradients = {name: each.grad for stage in parts for name, each in stage.chunks[0].named_parameters()}
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, each in whole.named_parameters():
        torch.testing.assert_close(gradients[name], each.grad, rtol=0, atol=0, msg=name)


def test_a_block_that_occurs_twice_is_tied() -> None:
    shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    chain = nn.Sequential(shared, nn.Tanh(), shared)
    parts = rrfp.split(chain, 3)
    assert [list(stage.ties) for stage in parts] == [["0.weight", "0.bias"], [], ["0.weight", "0.bias"]]
    torch.autograd.backward(loss_fn(chain(INPUTS[0]), TARGETS[0]))
    wanted = [each.grad for each in shared.parameters()]
    chain.zero_grad()
    with parts.local(loss_fn=loss_fn).blocking() as pipe:
        pipe.step(INPUTS[:1], TARGETS[:1])
    for each, gradient in zip(shared.parameters(), wanted, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=1e-14, atol=0)


def test_a_checkpoint_of_the_chain_loads_into_its_parts_and_theirs_merge_into_one() -> None:
    saved = nn.Sequential(*blocks()).state_dict()
    chain = nn.Sequential(*blocks())
    for parameter in chain.parameters():
        nn.init.zeros_(parameter)
    parts = rrfp.split(chain, 2)
    for stage in parts:
        stage.load_state_dict(saved)
    merged = rrfp.merge_state_dict([stage.state_dict() for stage in parts])
    assert list(merged) == list(saved)
    assert all(torch.equal(merged[name], saved[name]) for name in saved)
    with pytest.raises(rrfp.ConfigError, match=r"^states have two values of '0.linear.weight', must have one"):
        rrfp.merge_state_dict([parts[0].state_dict(), {"0.linear.weight": torch.zeros(1)}])


@pytest.mark.parametrize("by", ["parameters", "times"])
def test_cuts_are_balanced(by: Any) -> None:
    """The first block is by far the largest, and the slowest."""
    wide = nn.Sequential(nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 256))
    chain = nn.Sequential(wide, *(nn.Linear(256, 256) for _ in range(5)))
    assert rrfp.split(chain, 2, cuts=by, sample=torch.randn(64, 256)).cuts == (1,)
    assert all(parameter.grad is None for parameter in chain.parameters())


def test_measuring_writes_no_statistics() -> None:
    chain = nn.Sequential(nn.BatchNorm1d(WIDTH, dtype=torch.float64), nn.Dropout(), nn.Linear(WIDTH, WIDTH).double())
    before, state = {name: each.clone() for name, each in chain.state_dict().items()}, torch.get_rng_state()
    rrfp.split(chain, 2, cuts="times", check=True, sample=INPUTS[0])
    assert all(torch.equal(each, before[name]) for name, each in chain.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert chain.training
    assert chain[0].training


def test_a_checkpoint_without_an_entry_of_the_stage_is_refused() -> None:
    first, last = rrfp.split(blocks(), 2)
    with pytest.raises(rrfp.ConfigError, match=r"^state lacks '\d.linear.weight', must have all entries of stage 1$"):
        last.load_state_dict(first.state_dict())


def test_the_parts_may_be_chunks_of_fewer_stages() -> None:
    parts = rrfp.split(blocks(), 2, cuts=[1, 2, 3])
    assert [sorted({name[0] for name in stage.state_dict()}) for stage in parts] == [["0", "2"], ["1", "3"]]
    assert [len(stage.parameters()) for stage in parts] == [4, 4]
    with parts.local(loss_fn=loss_fn).blocking() as pipe:
        assert pipe.step(INPUTS, TARGETS).loss is not None


def test_a_stage_takes_its_place_in_a_mesh() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "ep"))
        (stage,) = rrfp.split(blocks(), 1)
        with stage.pipeline(mesh=mesh, coordinate=("ep",), loss_fn=loss_fn).blocking() as pipe:
            assert pipe.step(INPUTS, TARGETS).loss is not None
    finally:
        dist.destroy_process_group()


class Own(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return value


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Linear(1, 1), {}, "model is a Linear, must be a model of transformers, an nn.Sequential or a list of"),
        (Own(nn.Tanh()), {}, "model is a Own with a forward of its own, must be an nn.Sequential that calls"),
        ([nn.Tanh(), torch.tanh], {}, "model[1] is a builtin_function_or_method, must be an nn.Module"),
        ([nn.Tanh()], {}, "stages is 2, with 1 chunk each: must make at most 1 part, one for each layer"),
        (None, {"stages": 0}, "stages is 0, must be a whole number >= 1"),
        (None, {"stages": True}, "stages is True, must be a whole number >= 1"),
        (None, {"chunks": 0}, "chunks is 0, must be a whole number >= 1"),
        (None, {"chunks": 4}, "stages is 2, with 4 chunks each: must make at most 5 parts, one for each layer"),
        (None, {"placement": "w"}, "placement is 'w', must be one of: looped, v"),
        (None, {"cuts": "evenly"}, "cuts is 'evenly', must be 'parameters', 'times' or a list of layer numbers"),
        (None, {"cuts": 2}, "cuts is 2, must be 'parameters', 'times' or a list of 1 layer number in 1..4"),
        (None, {"cuts": [0]}, "cuts is [0], must be 1 layer number in 1..4, ascending"),
        (None, {"cuts": [5]}, "cuts is [5], must be 1 layer number in 1..4, ascending"),
        (None, {"cuts": [2.0]}, "cuts is [2.0], must be 'parameters', 'times' or a list of 1 layer number"),
        (None, {"cuts": [2, 1, 3]}, "cuts is [2, 1, 3], must be 3 layer numbers in 1..4, ascending"),
        (None, {"cuts": [1, 2]}, "cuts is [1, 2], must be 1 layer number in 1..4, ascending: the first layer of"),
        (None, {"cuts": "times"}, "sample is missing, must be a tiny batch of inputs of this model: cuts='times'"),
        (None, {"check": True}, "sample is missing, must be a tiny batch of inputs of this model: check=True needs it"),
        (None, {"check": "yes"}, "check is 'yes', must be True or False, or None"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rrfp.ConfigError) as refusal:
        rrfp.split(blocks() if model is None else model, **{"stages": 2, **arguments})
    assert str(refusal.value).startswith(message)


def test_hooks_of_the_chain_are_refused() -> None:
    chain = nn.Sequential(*blocks())
    chain.register_full_backward_hook(lambda *_: None)
    with pytest.raises(rrfp.ConfigError, match=r"^model has backward hooks on a Sequential that is cut, must have"):
        rrfp.split(chain, 2)


def test_a_forward_of_its_own_on_what_is_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has the forward of the class. Within a part it stays."""
    chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    monkeypatch.setattr(chain, "forward", lambda x: 2 * x)
    for at in (None, ["1"]):
        with pytest.raises(rrfp.ConfigError, match=r"^model has a forward of its own on a Sequential that is cut, "):
            rrfp.split(chain, 2, at=at, sample=torch.ones(2, WIDTH))
    monkeypatch.undo()
    layer = chain[0]
    own = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: 2 * own(x))
    x = torch.randn(3, WIDTH)
    first, second = rrfp.split(chain, 2)
    assert torch.equal(second.chunks[0](first.chunks[0](x)), chain(x))


def test_statistics_that_two_parts_would_keep_are_refused() -> None:
    """Each rank would have the means of its own calls, and the whole has those of both."""
    norm = nn.BatchNorm1d(WIDTH)
    wanted = r"^model is a Sequential whose forward writes the buffer '2.running_mean', which parts 0 and 1 both use"
    with pytest.raises(rrfp.ConfigError, match=wanted):
        rrfp.split(nn.Sequential(norm, nn.Tanh(), norm), 2)
    assert len(rrfp.split(nn.Sequential(norm, norm, nn.Tanh()), 2, cuts=[2])) == 2
    constant = nn.Sequential(nn.BatchNorm1d(WIDTH))
    constant.register_buffer("shift", torch.zeros(WIDTH))
    other = nn.Tanh()
    other.register_buffer("shift", constant.get_buffer("shift"))
    assert len(rrfp.split(nn.Sequential(constant, other), 2)) == 2


def test_layers_that_write_their_inputs_are_measured() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    assert len(rrfp.split(nn.Sequential(*layers), 2, cuts="times", sample=INPUTS[0].float())) == 2


@pytest.mark.long
def test_of_several_ranks_the_first_ones_measured_cuts_count() -> None:
    lines = reports("integrations/measured_cuts.py", ranks=2, timeout_s=50)
    assert [line["cuts"] for line in lines] == [[1], [1]]


def test_ranks_that_measure_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rrfp.ConfigError, match=r"^cuts is 'times', measured anew on each rank: initialise"):
        rrfp.split(blocks(), 2, cuts="times", sample=INPUTS[0])


def test_a_topology_of_another_size_is_refused() -> None:
    parts = rrfp.split(blocks(), 2)
    wanted = r"^topology is stage 1 of 3, must be stage 1 of 2, as this part of the split: start 2 ranks a replica, or "
    with pytest.raises(rrfp.ConfigError, match=wanted + r"split the model into 3$"):
        parts[1].pipeline(rrfp.Topology(1, 3))
    with pytest.raises(rrfp.ConfigError, match=r"must be stage 1 of 2, as this part of the split$"):
        parts[1].pipeline(rrfp.Topology(0, 2))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: rrfp.split(blocks(), 2, cuts=[3]), "Sequential of 5 layers, cut at [3]"),
        (lambda: rrfp.split(blocks()[:3], 2, cuts=[1]), "Sequential of 3 layers, cut at [1]"),
    ],
)
def test_ranks_that_cut_differently_are_refused_alike(
    other: Callable[[], Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they train a model that lacks some layers, or has some twice."""
    monkeypatch.setattr("rrfp.pipeline.api._numbers", defaultdict(lambda: itertools.repeat(0)))  # as in two processes
    met = LocalRendezvous()

    async def enter(stage: Any) -> None:
        place: Any = {"topology": rrfp.Topology(stage.index, 2), "rendezvous": met, "transport": "inproc"}
        async with stage.pipeline(**place, loss_fn=loss_fn, loop="caller"):
            pass

    async def both() -> list[Any]:
        ranks = enter(rrfp.split(blocks(), 2, cuts=[1])[0]), enter(other()[1])
        return list(await asyncio.gather(*ranks, return_exceptions=True))

    errors = asyncio.run(both())
    assert [type(error) for error in errors] == [rrfp.ConfigError] * 2
    wanted = (
        f"partition is 'Sequential of 5 layers, cut at [1]' on stage 0 and {text!r} on stage 1: must be the same on "
    )
    assert [str(error) for error in errors] == [f"{wanted}all ranks"] * 2


def test_no_other_library_is_imported(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(
        "import sys, rrfp\nfrom torch import nn\n"
        "rrfp.split([nn.Tanh(), nn.Tanh()], 2)\nprint([name for name in sys.modules if name == 'transformers'])\n"
    )
    assert printed(program) == "[]\n"


def test_its_repr_shows_the_layers_of_each_stage_and_no_parameter() -> None:
    parts = rrfp.split(blocks(), 2, cuts=[2])
    assert repr(parts) == "Split(Sequential of 5 layers, cut at [2]; stage 0: 0..1; stage 1: 2..4)"
    assert repr(parts[1]) == "SplitStage(index=1, stages=2, placement='looped', layers=(range(2, 5),))"
    chunks = rrfp.split(blocks(), 2, cuts=[1, 3, 4], placement="v")
    assert repr(chunks).endswith("; stage 0: 0 and 4; stage 1: 1..2 and 3)")


@pytest.mark.parametrize("index", [2, -3])
def test_a_stage_that_there_is_not_is_an_index_error_that_counts_the_stages(index: int) -> None:
    parts = rrfp.split(blocks(), 2)
    with pytest.raises(IndexError, match=rf"^stage {index} of a model that is split into 2, must be in -2\.\.1$"):
        parts[index]
    assert parts[-1] is parts[1]
    assert parts[:1] == (parts[0],)


def test_modes_are_set_by_stage() -> None:
    stage = rrfp.split(blocks(), 2)[0]
    stage.eval()
    assert not any(module.training for chunk in stage.chunks for module in chunk.modules())
    stage.train()
    assert all(module.training for chunk in stage.chunks for module in chunk.modules())
