"""Metrics in files: a row a step, over several runs, and one error where the file cannot take it."""

from __future__ import annotations

import csv
import json
import logging
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from callbacks.steps import RUN_ENDED, ended
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp import Topology
from rrfp.callbacks import Callback, Csv, JsonLines, metric_names, metrics
from rrfp.errors import ConfigError, RrfpError
from rrfp.model.tasks import Mode

BATCH = data(3)
KINDS = pytest.mark.parametrize("kind", [JsonLines, Csv])


def train(callback: Callback, steps: int = 2, first_step: int = 0) -> list[rrfp.StepResult]:
    options: Any = {"callbacks": [callback], "first_step": first_step, "limit": "n"}
    with rrfp.local(stages(2), loss_fn=loss_fn, **options).blocking() as pipe:
        return [pipe.step(BATCH.inputs, BATCH.targets) for _ in range(steps)] + [
            pipe.evaluate(BATCH.inputs, BATCH.targets)
        ]


def rows(path: Path, kind: Any) -> list[dict[str, Any]]:
    """Every row, with numbers as such."""
    if kind is JsonLines:
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return [
            {name: cell if name == "mode" else float(cell) if cell else None for name, cell in row.items()}
            for row in csv.DictReader(file)
        ]


@KINDS
def test_every_step_and_evaluation_is_a_row_and_a_resumed_run_goes_on(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    results = train(kind(path, tokens=10)) + train(kind(path, tokens=10), first_step=2)
    found = rows(path, kind)
    assert [(row["mode"], row["step"], row["completed"]) for row in found] == [
        ("train", 0, 1),
        ("train", 1, 2),
        ("evaluation", 2, 2),
        ("train", 2, 3),
        ("train", 3, 4),
        ("evaluation", 4, 4),
    ]
    for row, result in zip(found, results, strict=True):
        assert list(row) == metric_names(2)
        assert (row["loss"], row["seconds"], row["microbatches"]) == (result.loss, result.seconds, 3)
        assert row["tokens_per_second"] == pytest.approx(30 / result.seconds)
        for stage, (parts, peaks) in enumerate(zip(result.breakdown, result.peaks, strict=True)):
            assert row[f"blocked_input/stage{stage}"] == parts.share(parts.input)
            shares = [row[f"{name}/stage{stage}"] for name in ("compute", "blocked", "other")]
            assert sum(shares) == pytest.approx(1.0)
            assert (row[f"held/stage{stage}"], row[f"held_limit/stage{stage}"]) == (peaks.held, 2)
            assert (row[f"held_bytes/stage{stage}"], row[f"held_bytes_limit/stage{stage}"]) == (peaks.num_bytes, None)
            assert row[f"sent_bytes/stage{stage}"] > 0


def test_tokens_are_those_of_a_microbatch_on_all_replicas_or_of_the_step() -> None:
    assert metrics(ended())["tokens_per_second"] is None
    assert metrics(ended(), 10)["tokens_per_second"] == 10 * 4 * 2 / 0.25
    step = ended(sizes=(1.0, 2.0, 3.0, 4.0))
    assert metrics(step, lambda event: sum(event.sizes or ()))["tokens_per_second"] == 40


@pytest.mark.parametrize("tokens", [0, -1.0, math.inf, math.nan, True, "many"])
def test_impossible_tokens_are_refused(tokens: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens is .*, must be the tokens of a microbatch"):
        JsonLines(tmp_path / "metrics", tokens=tokens)


@KINDS
@pytest.mark.parametrize("path", [3, None, "a\0b"])
def test_what_is_no_path_is_refused(kind: Any, path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^path is .*, must be a path$"):
        kind(path)


def test_a_loss_that_is_no_number_is_null_in_json_and_text_in_csv(tmp_path: Path) -> None:
    for kind in (JsonLines, Csv):
        callback = kind(tmp_path / kind.__name__)
        callback.check(Topology(0, 2))
        callback.step_ended(ended(loss=math.nan))
        callback.run_ended(RUN_ENDED)
    assert rows(tmp_path / "JsonLines", JsonLines)[0]["loss"] is None
    assert math.isnan(rows(tmp_path / "Csv", Csv)[0]["loss"])


@KINDS
def test_only_rank_0_writes_and_looks_for_the_folder(kind: Any, tmp_path: Path) -> None:
    callback = kind(tmp_path / "missing" / "metrics")
    callback.check(Topology(1, 2))
    callback.step_ended(ended())
    callback.run_ended(RUN_ENDED)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"missing/metrics must be a file in a folder that exists"):
        rrfp.local(stages(2), callbacks=[callback])
    with pytest.raises(ConfigError, match="must be a file in a folder that exists"):
        rrfp.local(stages(2), callbacks=[kind(tmp_path)])


@KINDS
def test_the_file_of_someone_else_is_refused_and_stays_as_it_is(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("my notes,\nwithout an end")
    with pytest.raises(ConfigError, match="choose another file"):
        rrfp.local(stages(2), callbacks=[kind(path)])
    assert path.read_text() == "my notes,\nwithout an end"


def test_a_table_of_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    train(Csv(path))
    with pytest.raises(ConfigError, match=r"metrics\.csv has other columns than this run"):
        rrfp.local(stages(3), callbacks=[Csv(path)])


@KINDS
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.4, 1.3, 1.99])
def test_the_remains_of_a_row_are_cut_off(kind: Any, kept: float, tmp_path: Path) -> None:
    """A part of the first line, or all of it and a part of the second."""

    def write(step: int) -> None:
        callback = kind(path)
        callback.check(Topology(0, 2))
        callback.step_ended(ended(step, mode=Mode.FORWARD if step else Mode.TRAIN))
        callback.run_ended(RUN_ENDED)

    path = tmp_path / "metrics"
    write(0)
    write(1)
    first, second, *_ = path.read_bytes().splitlines(keepends=True)
    whole = first if kept >= 1 else b""
    torn = second if kept >= 1 else first
    path.write_bytes(whole + torn[: int(kept % 1 * len(torn))])
    write(2)
    expected = [0, 2] if kept >= 1 and kind is JsonLines else [2]
    assert [row["step"] for row in rows(path, kind)] == expected


@KINDS
def test_a_full_disk_is_one_line_of_error_and_training_goes_on(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rrfp")
    assert len(train(kind("/dev/full"), steps=3)) == 4
    first = [line for line in caplog.messages if "No space left on device" in line]
    assert len(first) == 2  # the first of step_ended and of evaluation_ended
    assert "step_ended raised RrfpError: a row for /dev/full is lost: No space left on device" in first[0]
    assert caplog.messages[-1].endswith("step_ended raised 3 times in this run; the first error was logged")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@KINDS
def test_a_row_that_fits_in_part_leaves_nothing_and_later_ones_are_written(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics"
    callback = kind(path)
    callback.check(Topology(0, 2))
    callback.step_ended(ended(0))
    with largest_file(path.stat().st_size + 10), pytest.raises(RrfpError, match="is lost: the disk is full"):
        callback.step_ended(ended(1))
    callback.step_ended(ended(2))
    callback.run_ended(RUN_ENDED)
    assert [row["step"] for row in rows(path, kind)] == [0, 2]
