"""Metrics for TensorBoard, read back by its own reader where it is installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from callbacks.steps import RUN_ENDED, begun, ended

from rrfp.callbacks import TensorBoard
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"needs the package tensorboard: pip install 'rrfp\[tensorboard\]'"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("default")  # of the package's own
def test_scalars_are_by_step_and_a_resumed_run_replaces_the_steps_that_it_runs_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    for first, losses in ((0, [4.0, 3.0, 2.5]), (2, [2.0, 1.0])):
        callback = TensorBoard(tmp_path / "board", tokens=10)
        callback.run_begun(begun(step=first))
        for step, loss in enumerate(losses, first):
            callback.step_ended(ended(step, loss=loss))
        callback.evaluation_ended(ended(9, loss=0.5, mode=Mode.FORWARD))
        callback.run_ended(RUN_ENDED)
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    board = reader.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(each.step, each.value) for each in board.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert [each.value for each in board.Scalars("blocked_input/stage1")] == [0.25] * 4
    assert board.Scalars("train/tokens_per_second")[0].value == 320
    assert board.Scalars("train/loss")[0].wall_time == 1000.0
    assert {each.value for each in board.Scalars("evaluation/loss")} == {0.5}
    tags = board.Tags()["scalars"]
    assert "held_bytes_limit/stage0" not in tags
    assert "train/step" not in tags


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    callback = TensorBoard(tmp_path / "board")
    callback.run_begun(begun(rank=1))
    callback.step_ended(ended())
    callback.run_ended(RUN_ENDED)
    assert not (tmp_path / "board").exists()
