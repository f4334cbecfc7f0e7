"""Chains whose stages hold any virtual stages, unequally many too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import rrfp
from rrfp.commands.app import app
from rrfp.testing.reference import reference

TABLE = [0, 0, 1, 1, 0]


def layers(count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(count)]


def by_stage(modules: list[nn.Module], table: list[int]) -> list[list[nn.Module]]:
    return [[module for module, stage in zip(modules, table, strict=True) if stage == own] for own in sorted({*table})]


def data(microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, microbatches, 3, 4, generator=generator, dtype=torch.float64)
    return list(inputs), list(targets)


@pytest.mark.parametrize("hint", ["slot-aware-pyramid", "bf", "fb"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("table", [TABLE, [0, 1, 2, 1], [1, 0], [0, 0, 0]])
def test_gradients_are_those_of_one_process(table: list[int], split: bool, hint: str) -> None:
    modules, (inputs, targets) = layers(len(table)), data(5)
    other = layers(len(table))
    wanted = reference(other, inputs, targets, loss_fn=nn.functional.mse_loss)
    options: dict[str, Any] = {"split": split, "hint": hint, "limit": 2, "deterministic": True}
    pipeline = rrfp.local(by_stage(modules, table), placement=table, loss_fn=nn.functional.mse_loss, **options)
    with pipeline.blocking() as pipe:
        result = pipe.step(inputs, targets)
    assert result.losses == wanted.losses
    for module, expected in zip(modules, other, strict=True):
        for parameter, gradient in zip(module.parameters(), expected.parameters(), strict=True):
            assert parameter.grad is not None
            assert gradient.grad is not None
            assert torch.equal(parameter.grad, gradient.grad)


def test_its_trace_is_a_cost_file_that_is_simulated(tmp_path: Path) -> None:
    pipeline = rrfp.local(by_stage(layers(5), TABLE), placement=TABLE, loss_fn=nn.functional.mse_loss, trace_steps=1)
    with pipeline.blocking() as pipe:
        pipe.step(*data(4))
        pipe.save_trace(tmp_path / "trace.json")
    runner = CliRunner()
    made = runner.invoke(
        app, ["costs", str(tmp_path / "trace.json"), "--skip-first", "0", "--out", str(tmp_path / "costs.json")]
    )
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "costs.json").read_text())["placement"] == TABLE
    found = runner.invoke(app, ["simulate", "--costs", str(tmp_path / "costs.json"), "--hint", "bf", "--json"])
    assert found.exit_code == 0, found.output
    assert [len(order) for order in json.loads(found.output)["order"]] == [24, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": [0, 1, 3]}, r"^placement is \[0, 1, 3\], must have every stage from 0 to the highest one$"),
        ({"placement": [0, 1, 2]}, r"^placement is \[0, 1, 2\], must have the stages 0\.\.1, as the pipeline has$"),
        ({"placement": [0, 0, 1]}, r"^module has chunks: 3, must have 2, as placement has them on stage 0$"),
        ({"placement": []}, r"^placement is \[\], must be one of: looped, v; or a list with the stage of each"),
        ({"placement": TABLE, "chunks": 2}, r"^chunks is 2, must be None with a list as placement, which says how"),
        ({"placement": TABLE, "strict": "1f1b"}, r"equally many chunks on each stage; the graph has stages of 2 to 3"),
        ({"placement": TABLE, "limit": "1f1b"}, r"^limit is '1f1b' with 3 chunks a stage, must be 'n', '2n'"),
        ({}, r"^modules have 2 and 3 chunks a stage, must have the same number on all, or placement must be a list"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rrfp.ConfigError, match=message):
        rrfp.local(by_stage(layers(5), TABLE), loss_fn=nn.functional.mse_loss, **options)
