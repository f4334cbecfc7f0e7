"""docs/messages.md says of every kind of message what it carries: compared with the messages of real runs."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from installed import ROOT
from runtime import copying_ranks, dealt_programs
from runtime.group_programs import MESH, programs, steps
from runtime.ranks import ThreadedRanks, step
from runtime.stuck_hints import RELEASE, Blocks
from runtime.toys import data, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp.model.tasks import Task
from rrfp.transports.base import Message, MessageKind
from rrfp.transports.inproc import InprocTransport

PAGE = (ROOT / "docs" / "messages.md").read_text()
CELLS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| `.*$", PAGE, re.MULTILINE)]
#: By kind: channels, ranks, step, task, tensors, body, meaning.
ROWS = {cells[0].strip("`"): cells[1:] for cells in CELLS}

STALL_S = 0.3

pytestmark = pytest.mark.allow_blocking(reason="one of the hints does")


class Recorded(InprocTransport):
    """Keeps every message that any rank sends."""

    sent: dict[MessageKind, list[Message]] = defaultdict(list)  # noqa: RUF012 - of all ranks

    async def send(self, peer: int, message: Message) -> None:
        self.sent[message.kind].append(message)
        await super().send(peer, message)


class Slow(nn.Module):
    """Takes so long that its forward is worth a report."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return x


def fails_late(task: Task) -> None:
    """Lets the others wait until they ask why, then fails."""
    if task.microbatch == 3:
        time.sleep(4 * STALL_S)
        raise ValueError("enough")


async def copies() -> None:
    async with copying_ranks.ranks(0, 1, make=Recorded) as made:
        for rank, given in zip(made, ({"inputs": data(2).inputs}, {}), strict=True):
            rank.begin(copying_ranks.plan_of(0, 2, **given))
        for rank in made:
            await rank.end()


@pytest.fixture(scope="module")
def sent() -> Mapping[MessageKind, list[Message]]:
    """The messages of runs that together send every kind but that of a disagreement, which needs luck."""
    batch, modules = data(4), stages(3)
    modules[2][0].weight = modules[0][0].weight  # type: ignore[index]
    modules[0].append(Slow())  # type: ignore[operator]
    with rrfp.local(modules, loss_fn=loss_fn, limit="1f1b", transport=Recorded) as pipe:
        for _ in range(3):  # forwards are reported once their duration is known
            pipe.step(batch.inputs, batch.targets)
        pipe.evaluate(batch.inputs, batch.targets)
    ThreadedRanks(programs(), steps(2), mesh=MESH, limit=rrfp.Limit(4, 1 << 30), transport=Recorded).join()
    ThreadedRanks(programs(), steps(2), mesh=MESH, coordination="agreement", depth=1, transport=Recorded).join()
    ThreadedRanks(programs(), steps(2), mesh=MESH, limit="auto", transport=Recorded).join()
    for way in ("dealt", True):
        shared: dict[str, Any] = {"mesh": dealt_programs.MESH, "share_replicas": way, "transport": Recorded}
        ThreadedRanks(dealt_programs.programs(), dealt_programs.steps, **shared).join()
    asyncio.run(copies())
    checked = programs(checks={2: fails_late})
    ThreadedRanks(checked, steps(1), mesh=MESH, stall_after=STALL_S, transport=Recorded).join()
    RELEASE.clear()
    stuck = ThreadedRanks(stages(3), step, hint=Blocks(1), stall_after=STALL_S, transport=Recorded)
    deadline = time.monotonic() + 20
    while not Recorded.sent[MessageKind.UNRESPONSIVE] and time.monotonic() < deadline:
        time.sleep(0.05)
    RELEASE.set()
    stuck.join()
    return Recorded.sent


def test_every_kind_of_message_has_a_row() -> None:
    assert list(ROWS) == [kind.value for kind in MessageKind]


@pytest.mark.parametrize("kind", [kind for kind in MessageKind if kind is not MessageKind.PROMPT])
def test_a_message_carries_what_its_row_says(kind: MessageKind, sent: Mapping[MessageKind, list[Message]]) -> None:
    channels, _, step_cell, task_cell, tensors, body, _ = ROWS[kind.value]
    fields = set(re.findall(r"`(\w+)`", body))
    forms = [fields - {"parts"}, fields - {"structure"}] if kind is MessageKind.OUTPUT else [fields]
    assert sent[kind], "no run has sent any"
    for message in sent[kind]:
        assert message.channel.value in channels.split(", ")
        for cell, given in ((step_cell, message.step), (task_cell, message.task)):
            assert cell == "maybe" or (cell == "yes") == (given is not None)
        assert tensors == "its tensors" or len(message.tensors) == int(tensors)
        assert set(message.body) in forms
