"""Outputs that arrive: the description beside their tensors is checked before any task reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rrfp.compute.mailbox import Mailbox
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task

#: The backward of virtual stage 2, whose gradients virtual stage 1 reads.
TASK = Task(Kind.B, 0, 2)
TENSORS = (torch.ones(1), torch.ones(2))


def test_gradients_are_kept_for_their_reader() -> None:
    mailbox = Mailbox(TaskGraph.chain(3), 1)
    mailbox.unpack(TASK, TENSORS, {"parts": [[1, 2]]})
    (payload,) = mailbox.inputs(Task(Kind.B, 0, 1))
    assert payload.tensors == TENSORS


@pytest.mark.parametrize(
    "parts",
    [
        None,
        5,
        [5],
        [[1]],
        [[[], 2]],
        [[1, -1], [1, 1]],
        [[1, 1], [1, 1]],
        [[1, 3]],
        [[1, 1]],
        [[1, "2"]],
        [[1, 2.0]],
        [[1, True], [1, 1]],
        [[1, None]],
        [[0, 2]],
        [[1, 2], [0, 0]],
        [],
    ],
)
def test_a_description_that_does_not_fit_the_tensors_is_refused(parts: Sequence[Any]) -> None:
    mailbox = Mailbox(TaskGraph.chain(3), 1)
    with pytest.raises(ProtocolError, match="B0@2 arrived with"):
        mailbox.unpack(TASK, TENSORS, {"parts": parts})
    with pytest.raises(KeyError):
        mailbox.inputs(Task(Kind.B, 0, 1))
