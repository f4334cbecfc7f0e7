"""Checkpoints in one process: names, what is refused, which are kept; and of a run without a pipeline."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.toys import data, loss_fn, stages
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import rrfp
from rrfp import checkpoint
from rrfp.errors import ConfigError, RrfpError

BATCH = data(4)


def adamw(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """With a group for weights and one for biases."""
    named = [each for module in modules for each in module.named_parameters()]
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}])


def by_layer(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {f"layers.{number}": module for number, module in enumerate(modules)}


def train(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, steps: int, folder: Path | None = None
) -> Any:
    """Train to step ``steps``, from the newest checkpoint of ``folder``, which gets one after each step."""
    pipeline, losses = rrfp.local(list(modules), loss_fn=loss_fn, deterministic=True), []
    loaded = None if folder is None else checkpoint.load(folder, by_layer(modules), optimizer, pipe=pipeline)
    with pipeline.blocking() as pipe:
        for _ in range(0 if loaded is None else loaded.step, steps):
            losses.append(pipe.step(BATCH.inputs, BATCH.targets).loss)
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None:
                checkpoint.save(folder, by_layer(modules), optimizer, pipe=pipe, keep=2)
    return losses


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train without a pipeline."""
    for _ in range(steps):
        for x, y in zip(BATCH.inputs, BATCH.targets, strict=True):
            loss = loss_fn(model(x), y) / len(BATCH.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def worst(left: Sequence[nn.Module], right: Sequence[nn.Module]) -> float:
    """The largest difference between parameters."""
    pairs = [
        pair
        for one, other in zip(left, right, strict=True)
        for pair in zip(one.parameters(), other.parameters(), strict=True)
    ]
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed, resumed = stages(3), stages(3), stages(3, seed=1)
    losses = train(whole, adamw(whole), 4)
    first = train(killed, adamw(killed), 2, tmp_path)
    assert first + train(resumed, adamw(resumed), 4, tmp_path) == losses
    assert worst(whole, resumed) == 0.0


@pytest.mark.parametrize("by", ["rrfp.checkpoint", "torch.distributed.checkpoint"])
def test_a_run_without_a_pipeline_goes_on_in_stages(by: str, tmp_path: Path) -> None:
    whole, staged = stages(3, dropout=0.0), stages(3, dropout=0.0, seed=1)
    model = nn.Module()
    model.layers = nn.Sequential(*whole)
    optimizer = adamw(whole)
    plain_steps(model.layers, optimizer, 2)
    path = tmp_path / "single"
    if by == "rrfp.checkpoint":
        path = checkpoint.save(tmp_path, model, optimizer, step=2, extra={"epoch": 1})
    else:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            dcp.save(state, checkpoint_id=path)
    pipeline, own = rrfp.local(list(staged), loss_fn=loss_fn), adamw(staged)
    loaded = checkpoint.load(tmp_path, by_layer(staged), own, pipe=pipeline, path=path)
    assert loaded is not None
    assert worst(whole, staged) == 0.0
    if by == "rrfp.checkpoint":
        assert (loaded.step, loaded.extra) == (2, {"epoch": 1})
        assert pipeline.state_dict()["step"] == 2
    plain_steps(model.layers, optimizer, 2)
    with pipeline.blocking() as pipe:
        for _ in range(2):
            pipe.step(BATCH.inputs, BATCH.targets)
            own.step()
            own.zero_grad()
    assert 0.0 <= worst(whole, staged) < 1e-12


def test_a_checkpoint_of_stages_goes_on_without_a_pipeline(tmp_path: Path) -> None:
    staged = stages(3)
    train(staged, adamw(staged), 2, tmp_path)
    model = nn.Module()
    model.layers = nn.Sequential(*stages(3, seed=1))
    optimizer = adamw(list(model.layers))
    loaded = checkpoint.load(tmp_path, model, optimizer)
    assert loaded is not None
    assert loaded.step == 2
    assert worst(staged, list(model.layers)) == 0.0
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())


def test_stages_of_a_split_keep_the_names_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(*stages(4))
    split = rrfp.split(model, 2)
    checkpoint.save(tmp_path, split, step=0)
    other = nn.Sequential(*stages(4, seed=1))
    assert checkpoint.load(tmp_path, other) is not None
    assert worst([model], [other]) == 0.0
    third = nn.Sequential(*stages(4, seed=2))
    for stage in rrfp.split(third, 2):
        assert checkpoint.load(tmp_path, stage) is not None
    assert worst([model], [third]) == 0.0


def test_the_random_numbers_of_the_caller_go_on(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        checkpoint.save(tmp_path, nn.Linear(1, 1), step=0)
        drawn = torch.rand(3)
        checkpoint.load(tmp_path, nn.Linear(1, 1))
        assert torch.equal(torch.rand(3), drawn)


def test_only_complete_checkpoints_count_and_the_last_ones_stay(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.load(tmp_path, module) is None
    (tmp_path / "notes.txt").write_text("mine")
    paths = [checkpoint.save(tmp_path, module, step=step, keep=2) for step in (1, 2)]
    killed = tmp_path / "000003-step-3"
    killed.mkdir()
    (killed / "__0_0.distcp").write_text("half")
    assert checkpoint.latest(tmp_path) == paths[1]
    assert checkpoint.load(tmp_path, module) is not None  # as what comes after it does
    saving = checkpoint.async_save(tmp_path, module, step=3, keep=2)
    assert saving.result() == tmp_path / "000004-step-3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-2", "000004-step-3", "notes.txt"]
    # Of a run that went back to an older one, the newest save counts, and stays.
    again = checkpoint.save(tmp_path, module, step=1, keep=1)
    assert checkpoint.latest(tmp_path) == again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000005-step-1", "notes.txt"]


def test_a_killed_save_loses_nothing_before_it(tmp_path: Path) -> None:
    first = checkpoint.save(tmp_path, nn.Linear(2, 2), step=1, keep=1)
    for number in (2, 3):
        (tmp_path / f"00000{number}-step-{number}").mkdir()
    assert checkpoint.latest(tmp_path) == first


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    first = checkpoint.async_save(tmp_path, module, step=1)
    second = checkpoint.async_save(tmp_path, module, step=2)
    assert first.is_complete
    second.result()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("not a folder")
    text = f"checkpoint in {tmp_path} cannot be written: rank 0: NotADirectoryError"
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(RrfpError, match=text):
            save(tmp_path, module, step=3)
    tmp_path.unlink()
    assert checkpoint.save(tmp_path, module, step=4).exists()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "same names": (stages(2), {"step": 1}, "two modules of this process have the name '0.weight' for different values"),
    "neither module nor list": (1, {"step": 1}, "modules has a value of type int, must be a module, a list of them"),
    "no module": ([1], {"step": 1}, "modules has a value of type int, must be a module, a list of them"),
    "no step": (nn.Linear(1, 1), {}, "step goes without pipe, whose state has it: must be exactly one of them"),
    "bad step": (nn.Linear(1, 1), {"step": -1}, "step is -1, must be a whole number >= 0"),
    "bad keep": (nn.Linear(1, 1), {"step": 1, "keep": 0}, "keep is 0, must be a whole number >= 1, or None"),
    "unknown": (nn.Linear(1, 1), {"steps": 1}, "unknown argument 'steps' (did you mean 'step'?), must be one of: pipe"),
    "no optimizer": (nn.Linear(1, 1), {"step": 1, "optimizer": 1}, "optimizer is of type int, must be a torch.optim"),
    "other parameters": (
        nn.Linear(1, 1),
        {"step": 1, "optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters())},
        "optimizer has a parameter of shape (2, 3) that is in none of modules",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_save_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    modules, arguments, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        checkpoint.save(tmp_path / "run", modules, **arguments)
    assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"layers.0": nn.Linear(2, 2)}, step=1)
    other = nn.Linear(2, 2)
    for modules, text in (
        ({"layers.1": other}, "the checkpoint lacks 'layers.1.weight', must have every name of modules: it has"),
        (
            {"layers.0": nn.Linear(2, 3)},
            "'layers.0.weight' is of shape (2, 2) in the checkpoint, must be of shape (3, 2)",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            checkpoint.load(tmp_path, modules)
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match=r"no optimizer state by name for 'layers\.0\.weight'"):
        checkpoint.load(tmp_path, {"layers.0": other}, torch.optim.SGD(other.parameters()))
    with pytest.raises(ConfigError, match=r"must be the folder of a complete checkpoint: it has no \.metadata"):
        checkpoint.load(tmp_path, {"layers.0": other}, path=tmp_path / "no")


def test_layers_of_a_checkpoint_that_no_rank_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rrfp")
    saved = stages(3)
    checkpoint.save(tmp_path, by_layer(saved), step=1)
    checkpoint.load(tmp_path, by_layer(stages(3, seed=1)))
    assert not [record for record in caplog.records if record.name.startswith("rrfp")]
    fewer = stages(2, seed=1)
    checkpoint.load(tmp_path, by_layer(fewer))
    assert worst(fewer, saved[:2]) == 0
    [record] = [record for record in caplog.records if record.name.startswith("rrfp")]
    names = sorted(f"layers.2.{name}" for name, _ in saved[2].named_parameters())
    assert record.getMessage() == (
        f"{len(names)} parameter(s) or buffer(s) of the checkpoint are in no rank's modules, and are left out: "
        f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    )
