"""Checkpoints of graphs: the dict by part is enough, on other stages too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs.graph_models import MICROBATCHES, WIDTH, Block, loss_fn, model, tensors
from torch import Tensor, nn

import rrfp
from rrfp import checkpoint
from rrfp.errors import ConfigError

VISITS = {"vision": [True, False, True, True], "audio": [False, True, True, False]}

#: The layers of the image encoder and of the language model on each stage, and the stage of the audio encoder.
Layout = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]], int]

WIDE: Layout = ([[0], [1], [], []], [[], [], [0, 1], [2]], 1)
NARROW: Layout = ([[0, 1], []], [[0], [1, 2]], 1)
#: Two modules of one part on a stage.
TWICE: Layout = ([[0], [1]], [[0, 1, 2], []], 0)


class Layers(nn.Module):
    """Some layers of a part, under the numbers that they have in the whole part."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})

    def forward(self, x: Tensor, **read: Tensor | None) -> Tensor:
        for number, layer in self.layers.items():
            x = layer(x, **read) if number == "0" else layer(x)
        return x


def job(layout: Layout, seed: int) -> tuple[rrfp.Graph, list[dict[str, nn.Module]]]:
    """The graph, and the modules of each stage by part."""
    vision, lm, audio = layout
    graph, by_stage = rrfp.Graph(), [dict[str, nn.Module]() for _ in vision]
    torch.manual_seed(seed)
    parts = {"vision": vision, "audio": [[0] if stage == audio else [] for stage in range(len(vision))], "lm": lm}
    for name, numbers in parts.items():
        reads: Any = {"image": graph.parts["vision"], "sound": graph.parts["audio"]} if name == "lm" else {}
        stages = [stage for stage, own in enumerate(numbers) if own]
        graph.part(name, stages=stages, reads=reads, optional=name != "lm")
        for stage in stages:
            by_stage[stage][name] = Layers(numbers[stage]).double()
    return graph, by_stage


def parameters(by_stage: Sequence[Mapping[str, nn.Module]]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{key}": parameter
        for own in by_stage
        for name, module in own.items()
        for key, parameter in module.named_parameters()
    }


def train(layout: Layout, steps: int, folder: Path | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Train up to step ``steps``, from the newest checkpoint of ``folder``, which gets one at the end."""
    graph, by_stage = job(layout, seed)
    optimizer = torch.optim.Adam(parameters(by_stage).values(), lr=0.1)
    pipeline = rrfp.local(list(by_stage), graph=graph, loss_fn=loss_fn, deterministic=True)
    loaded = None if folder is None else checkpoint.load(folder, by_stage, optimizer, pipe=pipeline)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        batch = {name: [each.double() for each in tensors(WIDTH)] for name in graph.parts}
    with pipeline.blocking() as pipe:
        for _ in range(0 if loaded is None else loaded.step, steps):
            pipe.step(batch, batch["lm"], visits=VISITS)
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            checkpoint.save(folder, by_stage, optimizer, pipe=pipe)
    return {name: parameter.detach() for name, parameter in parameters(by_stage).items()}


@pytest.mark.parametrize("layouts", [(WIDE, WIDE), (WIDE, NARROW), (NARROW, TWICE), (TWICE, WIDE)])
def test_a_run_goes_on_wherever_its_parts_lie(layouts: tuple[Layout, Layout], tmp_path: Path) -> None:
    first, second = layouts
    whole = train(first, 4)
    train(first, 2, tmp_path)
    resumed = train(second, 4, tmp_path, seed=7)
    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert (resumed[name] - value).abs().max() <= 1e-12, name


def test_measured_durations_go_on_with_the_state_of_a_graph() -> None:
    own = model("colocated")
    pipeline = rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn)
    with pipeline.blocking() as pipe:
        pipe.step(own.inputs, own.targets, visits=own.visits)
    state = pipeline.state_dict()
    counts = {each["virtual_stage"]: {s["kind"]: s["count"] for s in each["durations"]} for each in state["measured"]}
    assert state["virtual_stages"] == 6
    assert counts == {v: {"F": count, "B": count} for v, count in enumerate([2, 2, 2, 2, MICROBATCHES, MICROBATCHES])}
    other = rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn)
    other.load_state_dict(state)
    assert other.state_dict() == state


def branch(names: Sequence[str], lm_stages: Sequence[int] = (1,)) -> Any:
    """A pipeline of two encoders, declared in the order of ``names``, and a language model; not entered."""
    graph = rrfp.Graph()
    encoders = {name: graph.part(name, stages=[0], optional=True) for name in names}
    graph.part("lm", stages=lm_stages, reads=encoders)
    torch.manual_seed(0)
    modules: list[Any] = [{name: Block() for name in names}, {"lm": [Block() for _ in lm_stages]}]
    return rrfp.local(modules, graph=graph, loss_fn=loss_fn)


def counted(state: Any) -> dict[str, int]:
    """The forwards that were measured, by the name of the virtual stage."""
    return {
        state["names"][each["virtual_stage"]]: spent["count"]
        for each in state["measured"]
        for spent in each["durations"]
        if spent["kind"] == "F"
    }


def branch_state() -> Any:
    """After a step in which vision ran once, audio three times."""
    visits = {"vision": [True, False, False, False], "audio": [False, True, True, True]}
    batch = {name: tensors(WIDTH) for name in ("vision", "audio", "lm")}
    with branch(["vision", "audio"]).blocking() as pipe:
        pipe.step(batch, batch["lm"], visits=visits)
        return pipe.state_dict()


def test_measured_values_follow_the_names_of_parts_declared_in_another_order(caplog: pytest.LogCaptureFixture) -> None:
    state = branch_state()
    assert state["names"] == ["vision", "audio", "lm"]
    assert counted(state) == {"vision": 1, "audio": 3, "lm": 4}
    other = branch(["audio", "vision"])
    other.load_state_dict(state)
    assert caplog.messages == [
        "the state was saved with names vision, audio, lm, this pipeline has audio, vision, lm: dropout draws other "
        "numbers than before, and measured sizes and durations are used where the name is the same"
    ]
    assert counted(other.state_dict()) == counted(state)
    batch = {name: tensors(WIDTH) for name in ("vision", "audio", "lm")}
    with other.blocking() as pipe:
        pipe.step(batch, batch["lm"], visits={"vision": [False] * MICROBATCHES})
        assert counted(pipe.state_dict()) == {"vision": 1, "audio": 7, "lm": 8}


def test_a_graph_cut_otherwise_keeps_what_was_measured_on_parts_with_the_same_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = branch(["vision", "audio"], lm_stages=[1, 1])
    other.load_state_dict(branch_state())
    (warning,) = caplog.messages
    assert "names vision, audio, lm, this pipeline has vision, audio, lm.0, lm.1: dropout" in warning
    assert counted(other.state_dict()) == {"vision": 1, "audio": 3}


def test_a_state_saved_without_names_is_matched_by_number(caplog: pytest.LogCaptureFixture) -> None:
    state = branch_state()
    del state["names"]
    other = branch(["audio", "vision"])
    other.load_state_dict(state)
    assert counted(other.state_dict()) == {"audio": 1, "vision": 3, "lm": 4}
    assert not caplog.messages


@pytest.mark.parametrize("names", [["vision", "lm"], ["lm", "lm", "lm"]])
def test_names_that_do_not_fit_the_state_are_refused(names: list[str]) -> None:
    other = branch(["vision", "audio"])
    with pytest.raises(ConfigError, match=r"state: names is .*, must be 3 different texts"):
        other.load_state_dict({**branch_state(), "names": names})


def test_modules_of_a_part_with_the_same_names_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have the name 'vision\.linear\.weight' .* may be 'vision\.layers\.4'"):
        checkpoint.save(tmp_path, [{"vision": [Block(), Block()]}], step=1)


def test_what_is_no_module_in_a_list_of_a_part_is_refused(tmp_path: Path) -> None:
    modules: Any = {"vision": [Block(), 3]}
    with pytest.raises(
        ConfigError, match=r"modules has a value of type int, must be .* a dict \{name in the whole model, or part"
    ):
        checkpoint.save(tmp_path, modules, step=1)
