"""Random forks: the same numbers wherever, whenever and beside whatever a task runs."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from compute.stage_driver import train
from runtime.host_device import CudaLike
from torch import Tensor, nn

import rrfp
from rrfp.compute.rng import RandomForks, fork_seed
from rrfp.errors import StageError
from rrfp.model.tasks import Kind, Task


def test_seeds_are_fixed_for_ever() -> None:
    """Changing them would change the runs of every user."""
    assert fork_seed(0, 0, Task(Kind.F, 0, 0)) == 0xB935311A43F072A5
    assert fork_seed(1, 2, Task(Kind.B, 3, 4)) == 0x1C4F22AB1F0635E3


def test_every_coordinate_counts() -> None:
    seeds = {
        fork_seed(seed, step, Task(kind, m, v))
        for seed in (0, 1)
        for step in (0, 1)
        for kind in (Kind.F, Kind.B)
        for m in (0, 11)
        for v in (0, 1, 11)
    }
    assert len(seeds) == 48


def test_the_callers_generator_is_put_back_even_after_an_error() -> None:
    def fail() -> None:
        torch.rand(5)
        raise KeyError

    before = torch.default_generator.get_state()
    with pytest.raises(KeyError):
        RandomForks(0).run(0, Task(Kind.F, 0, 0), fail)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_without_a_seed_nothing_is_forked() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(RandomForks(None).run(0, Task(Kind.F, 0, 0), torch.rand, 4), expected)


def test_a_fork_inside_a_fork_is_an_error_at_once() -> None:
    """As where a module calls `rrfp.testing.reference`; its own numbers go on afterwards."""
    forks, inner = RandomForks(5), Task(Kind.F, 0, 1)

    def nested() -> Tensor:
        with pytest.raises(
            StageError, match=r"task F0@1 cannot have torch's random generators: they belong to task F0@0"
        ):
            forks.run(0, inner, torch.rand, 4)
        return torch.rand(4)

    assert torch.equal(forks.run(0, Task(Kind.F, 0, 0), nested), forks.run(0, Task(Kind.F, 0, 0), torch.rand, 4))


def test_forks_exclude_each_other() -> None:
    forks, entered = RandomForks(5), threading.Event()

    thread = threading.Thread(target=forks.run, args=(0, Task(Kind.F, 0, 1), entered.set))

    def lane() -> None:
        thread.start()
        assert not entered.wait(0.05)

    forks.run(0, Task(Kind.F, 0, 0), lane)
    assert entered.wait(5)
    thread.join()


def test_masks_are_the_same_in_several_threads_and_any_order() -> None:
    """All lanes of `rrfp.local` share one process, and torch's CPU generator with it."""
    forks = RandomForks(5)
    tasks = [Task(Kind.F, m, v) for v in range(3) for m in range(60)]

    def draw() -> Tensor:
        return torch.cat([torch.nn.functional.dropout(torch.ones(200)) for _ in range(3)])

    def mask(task: Task) -> Tensor:
        return forks.run(0, task, draw)

    expected = {task: mask(task) for task in tasks}
    found: dict[Task, Tensor] = {}

    def lane(v: int) -> None:
        mine = [task for task in tasks if task.virtual_stage == v]
        random.Random(v).shuffle(mine)
        for task in mine:
            found[task] = mask(task)

    threads = [threading.Thread(target=lane, args=(v,)) for v in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[task], expected[task]) for task in tasks)


@pytest.fixture
def cuda_generators(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Generator, ...]:
    """Stand for those of two CUDA devices, of which the second is current."""
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return generators


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_the_generator_of_a_device_is_forked_also_where_the_device_has_no_index(
    device: str, index: int, cuda_generators: tuple[torch.Generator, ...]
) -> None:
    forked, other = cuda_generators[index], cuda_generators[1 - index]
    states = [forked.get_state(), other.get_state()]
    forks = RandomForks(0, frozenset({torch.device(device)}))

    def draw() -> Tensor:
        return torch.rand(3, generator=forked)

    task = Task(Kind.F, 0, 0)
    assert torch.equal(forks.run(0, task, draw), forks.run(0, task, draw))
    assert torch.equal(forks.run(0, task, other.get_state), states[1])
    assert torch.equal(forked.get_state(), states[0])


class Noisy(nn.Module):
    """Has no parameter, and draws from a device's generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


def test_tasks_on_the_device_of_the_option_fork_its_generator_though_no_parameter_lies_there(
    cuda_generators: tuple[torch.Generator, ...],
) -> None:
    def outputs(order: str) -> list[Tensor]:
        pipeline = rrfp.local([Noisy(cuda_generators[1])], device=CudaLike(), hint=order)
        with pipeline.blocking() as pipe:
            results = pipe.evaluate([torch.zeros(2)] * 3).outputs
        return [results[m] for m in range(3)]

    first, second = outputs("bf"), outputs("f-priority")
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])


class LateNoise(torch.autograd.Function):
    """Adds noise to the value, and to its gradient; notes what it drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m: int, drawn: dict[Task, Tensor]) -> Tensor:
        ctx.m, ctx.drawn = m, drawn
        noise = drawn[Task(Kind.F, m, 0)] = torch.rand_like(x)
        return x + noise

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        noise = ctx.drawn[Task(Kind.B, ctx.m, 0)] = torch.rand_like(gradients[0])
        return gradients[0] + noise, None, None


class Late(nn.Module):
    """Draws only in microbatches from the sixth on, where its input says so, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drawn: dict[Task, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        m = int(x[0, 0])
        output: Tensor = self.linear(x)
        if m >= 5:
            output = LateNoise.apply(output, m, self.drawn)  # type: ignore[no-untyped-call]
        return output


@pytest.mark.parametrize("split", [False, True])
def test_a_module_that_begins_to_draw_in_a_later_microbatch_draws_what_it_would_draw_alone(split: bool) -> None:
    forks, count = RandomForks(0), 8
    module = Late()
    inputs = [torch.full((3, 4), float(m)) for m in range(count)]
    train([module], inputs, inputs, lambda output, target: (output * target).sum(), split=split)
    tasks = [Task(kind, m, 0) for kind in (Kind.F, Kind.B) for m in (5, 6, 7)]
    assert set(module.drawn) == set(tasks)
    for task in tasks:
        assert torch.equal(module.drawn[task], forks.run(0, task, torch.rand, 3, 4))
