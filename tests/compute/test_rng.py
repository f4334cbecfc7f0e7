"""Random forks: the same numbers wherever, whenever and beside whatever a task runs."""

from __future__ import annotations

import random
import threading

import torch
from torch import Tensor

from rrfp.compute.rng import RandomForks, fork_seed
from rrfp.core.tasks import Kind, Task


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
    before = torch.default_generator.get_state()
    try:
        with RandomForks(0).fork(0, Task(Kind.F, 0, 0)):
            torch.rand(5)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.default_generator.get_state(), before)


def test_without_a_seed_nothing_is_forked() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with RandomForks(None).fork(0, Task(Kind.F, 0, 0)), RandomForks(None).fork(0, Task(Kind.F, 1, 0)):
        assert torch.equal(torch.rand(4), expected)


def test_forks_exclude_each_other() -> None:
    forks, entered = RandomForks(5), threading.Event()

    def other_lane() -> None:
        with forks.fork(0, Task(Kind.F, 0, 1)):
            entered.set()

    thread = threading.Thread(target=other_lane)
    with forks.fork(0, Task(Kind.F, 0, 0)):
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()


def test_masks_are_the_same_in_several_threads_and_any_order() -> None:
    """All lanes of `rrfp.local` share one process, and torch's CPU generator with it."""
    forks = RandomForks(5)
    tasks = [Task(Kind.F, m, v) for v in range(3) for m in range(60)]

    def mask(task: Task) -> Tensor:
        with forks.fork(0, task):
            return torch.cat([torch.nn.functional.dropout(torch.ones(200)) for _ in range(3)])

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
