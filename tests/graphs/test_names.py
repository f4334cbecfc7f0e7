"""Errors call the modules of a graph by their parts; nobody who wrote parts has numbered virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from graphs.graph_models import WIDTH, Block, loss_fn, tensors
from torch import Tensor, nn

import rrfp
from rrfp.errors import RrfpError

#: Modules by part.
Parts = Mapping[str, Any]


class Table(nn.Module):
    """A table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.words(torch.zeros(len(x), dtype=torch.int64))
        return x + found


class Wrapper(nn.Module):
    """What FullyShardedDataParallel is recognised by."""

    def summon_full_params(self) -> None:
        raise AssertionError("never called")


def shared_norms() -> Parts:
    norm = nn.BatchNorm1d(WIDTH)
    return {"audio": nn.Sequential(norm), "lm": [Block(), nn.Sequential(norm)]}


def frozen_alone() -> Parts:
    audio, end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    end.load_state_dict(audio.state_dict())
    return {"audio": audio, "lm": [Block(), end]}


def two_of(parts: Parts) -> Any:
    return {"ties": {"it": [parts["audio"].linear.weight, parts["audio"].again]}}


def twice() -> Block:
    block = Block()
    block.again = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    return block


def parts(**own: Any) -> Parts:
    return {"audio": Block(), "lm": [Block(), Block()], **own}


#: Makes the modules; options of the pipeline made of them; the error.
REFUSED: Mapping[str, tuple[Callable[[], Parts], Callable[[Parts], Any], str]] = {
    "a tie alone": (
        parts,
        lambda own: {"ties": {"it": own["audio"].linear.weight}},
        "tie 'it' is on part 'audio' (stage 0) alone, must be on two at least",
    ),
    "two copies": (
        lambda: parts(audio=twice()),
        two_of,
        "ties['it'] has two parameters of part 'audio', must have one",
    ),
    "a sparse tie": (
        lambda: parts(audio=Table()),
        lambda own: {"ties": {"it": own["audio"].words.weight}},
        "the submodule 'words' of part 'audio' has sparse=True, must be sparse=False: its weight is in the tie 'it'",
    ),
    "a wrapper": (
        lambda: parts(lm=[Block(), Wrapper()]),
        lambda _: {},
        "the module of module 1 of part 'lm' is in FullyShardedDataParallel",
    ),
    "a lazy module": (
        lambda: parts(audio=nn.LazyLinear(WIDTH)),
        lambda _: {},
        "'weight' of LazyLinear on part 'audio' is lazy, must have a shape",
    ),
    "a shared buffer": (
        shared_norms,
        lambda _: {"deterministic": True},
        "deterministic is True, but part 'audio' and module 1 of part 'lm' share '0.running_mean'",
    ),
    "no values": (
        lambda: parts(audio=nn.Linear(WIDTH, WIDTH, device="meta")),
        lambda _: {},
        "'weight' of part 'audio' is on the meta device, must have values",
    ),
}


def run(own: Parts, **options: Any) -> Any:
    """A step after which gradients are clipped."""
    graph = rrfp.Graph()
    audio = graph.part("audio", stages=[0], optional=True)
    graph.part("lm", stages=[0, 1], reads={"sound": audio})
    stages: list[Any] = [{"audio": own["audio"], "lm": own["lm"][0]}, {"lm": own["lm"][1]}]
    batch = {name: tensors(WIDTH) for name in ("audio", "lm")}
    with rrfp.local(stages, graph=graph, loss_fn=loss_fn, **options).blocking() as pipe:
        pipe.step(batch, batch["lm"])
        return pipe.clip_grad_norm_(1.0)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_the_first_step_is_named_by_its_part(case: str) -> None:
    make, options, text = REFUSED[case]
    own = make()
    with pytest.raises(RrfpError) as caught:
        run(own, **options(own))
    assert text in str(caught.value)
    assert "virtual stage" not in str(caught.value)


def test_a_tie_frozen_in_training_is_named_by_its_parts() -> None:
    own = frozen_alone()
    ties = {"it": [own["audio"].weight, own["lm"][1].weight]}

    def freeze(*_: Any) -> None:
        own["audio"].weight.requires_grad_(False)

    own["lm"][1].register_full_backward_hook(freeze)
    with pytest.raises(rrfp.PipelineAborted) as caught:
        run(own, ties=ties)
    assert caught.value.origin.cause == "StageError: tie 'it' is frozen on part 'audio' only, must be on all or none"


def test_a_missing_target_is_wanted_where_the_loss_is() -> None:
    own = parts()
    graph = rrfp.Graph()
    audio = graph.part("audio", stages=[0])
    graph.part("lm", stages=[0, 1], reads={"sound": audio})
    stages: list[Any] = [{"audio": own["audio"], "lm": own["lm"][0]}, {"lm": own["lm"][1]}]
    batch = {name: tensors(WIDTH) for name in ("audio", "lm")}
    wanted = "targets is missing, must be a list of 4 on the rank that computes the loss"
    with rrfp.local(stages, graph=graph, loss_fn=loss_fn).blocking() as pipe, pytest.raises(RrfpError, match=wanted):
        pipe.step(batch)
