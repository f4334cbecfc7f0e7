"""A training run of which a rank is killed in a drawn task or write: restarted, it ends with the same bits."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from examples.test_train_gpt import SMALL
from fork_server import fork_server, printed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

__all__ = ["fork_server"]

SCRIPT = Path(__file__).parent / "killed_once.py"
STEPS, SAVE_EVERY = 6, 2

#: Ranks, and options of the example.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "4 stages": (4, ()),
    "looped": (2, ("--chunks", "2")),
    "v": (2, ("--chunks", "2", "--placement", "v")),
    "replicas": (4, ("--pp", "2", "--dp", "2")),
}

#: torchrun, whose ranks fork from its agent: most of the time of a small run is imports.
FORKING = ("-m", "torch.distributed.run", "--standalone", "--run-path", "--start-method", "fork")

Where = Literal["task", "write"]

#: The rank, where it is killed, and after how many of these.
Kill = tuple[int, Where, int]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def words(folder: Path, options: tuple[str, ...], kills: list[Kill], save: str = "async") -> tuple[str, ...]:
    """The script's arguments."""
    plan = json.dumps({"kills": kills, "save": save})
    own = (plan, "--checkpoint", str(folder), "--resume", "--save-every", str(SAVE_EVERY), "--steps", str(STEPS))
    return (*own, "--deterministic", "--evaluate-every", "3", *SMALL, *options)


def losses(output: str) -> dict[int, str]:
    """The loss of each step, the same on all ranks and in all attempts."""
    by_step: dict[int, set[str]] = {}
    for number, loss in re.findall(r"training step (\d+) has loss (\S+)", output):
        by_step.setdefault(int(number), set()).add(loss)
    assert all(len(each) == 1 for each in by_step.values()), by_step
    return {number: each.pop() for number, each in sorted(by_step.items())}


def digests(folder: Path, step: int = STEPS) -> dict[str, str]:
    """Of every parameter and optimizer state in the newest checkpoint."""
    newest = max(path for path in folder.iterdir() if (path / ".metadata").exists())
    assert newest.name.endswith(f"-step-{step}")
    names = FileSystemReader(newest).read_metadata().state_dict_metadata
    wanted = {name for name in names if name.startswith(("model.", "optimizer."))}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        loaded: dict[str, Any] = _load_state_dict_from_keys(wanted, checkpoint_id=newest)
    entries = dict(_flat(loaded))
    assert len(entries) == len(wanted)
    return {name: hashlib.sha256(_bytes(value)).hexdigest() for name, value in entries.items()}


def _flat(entries: dict[str, Any], prefix: str = "") -> Any:
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _bytes(value: Any) -> bytes:
    return value.numpy().tobytes() if hasattr(value, "numpy") else pickle.dumps(value)


Whole = Callable[[str], tuple[dict[int, str], dict[str, str]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Losses and digests of a run on a layout that is left alone."""

    @cache
    def run(layout: str) -> tuple[dict[int, str], dict[str, str]]:
        ranks, options = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp("whole")
        output = printed(SCRIPT, *words(folder, options, []), ranks=ranks, timeout_s=80)
        assert list(losses(output)) == list(range(STEPS))
        return losses(output), digests(folder)

    return run


def check(folder: Path, whole: Whole, layout: str, kill: Kill, save: str = "async") -> str:
    """Compare a run in which a rank is killed with one that is left alone; returns what it printed."""
    ranks, options = LAYOUTS[layout]
    launcher = (*FORKING, "--nproc-per-node", str(ranks), "--max-restarts", "1")
    output = printed(*launcher, SCRIPT, *words(folder, options, [kill], save), timeout_s=80)
    assert output.count("is killed") == 1
    assert (losses(output), digests(folder)) == whole(layout), f"killed: {kill}"
    return output


def draw(seed: int, layout: str, where: Where) -> Kill:
    """A rank, and one of the tasks that all steps but the last have, or of its writes of the first saves."""
    ranks, options = LAYOUTS[layout]
    random_ = random.Random(seed)
    rank = random_.randrange(ranks)
    if where == "write":
        # Three saves have more of every rank. Those of the second replica write hyperparameters and their own state.
        return rank, where, random_.randint(1, {"4 stages": 700, "replicas": 90}.get(layout, 1400))
    # A step has four tasks of each of four blocks: two microbatches, forward and backward.
    stages = 2 if "--pp" in options else ranks
    return rank, where, random_.randint(1, (STEPS - 1) * 4 * 4 // stages)


@pytest.mark.parametrize(("where", "seed"), [("task", 1), ("write", 0)])
def test_a_run_that_was_killed_ends_with_the_bits_of_one_that_was_not(
    where: Where, seed: int, tmp_path: Path, whole: Whole
) -> None:
    assert "resumed after step" in check(tmp_path, whole, "v", draw(seed, "v", where))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_rank_and_task_or_write(layout: str, seed: int, tmp_path: Path, whole: Whole) -> None:
    where: Where = "write" if seed % 2 else "task"
    check(tmp_path, whole, layout, draw(seed, layout, where), "sync" if seed == 5 else "async")
