"""Split backward is an option of its own: neither a hint nor a default that is written out turns it on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.errors import ConfigError
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.model.tasks import Kind

HINTS = ["bf", "bfw", "bfw-pyramid", "slot-aware", DEFAULT_HINT]


def kinds(**options: Any) -> set[Kind]:
    """The kinds of the tasks that a step runs."""
    batch = data(3)
    with rrfp.local(stages(2), loss_fn=loss_fn, **options).blocking() as pipe:
        return {span.task.kind for span in pipe.step(batch.inputs, batch.targets).trace.tasks}


@pytest.mark.parametrize("hint", HINTS)
def test_only_the_option_splits_backward(hint: str) -> None:
    assert kinds(hint=hint) == kinds(hint=hint, split=False) == {Kind.F, Kind.B}
    assert kinds(hint=hint, split=True) == {Kind.F, Kind.B, Kind.W}


def test_a_default_that_is_written_out_changes_nothing() -> None:
    def peaks(**options: Any) -> tuple[int, ...]:
        batch = data(3)
        with rrfp.local(stages(1), loss_fn=loss_fn, **options).blocking() as pipe:  # one stage: no timing matters
            return pipe.step(batch.inputs, batch.targets).peak_bytes

    assert peaks() == peaks(hint=DEFAULT_HINT, limit="2n", split=False, strict=None)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"hint": "bfw"}, [(logging.WARNING, "bfw")]),
        ({"hint": "slot-aware"}, [(logging.WARNING, "slot-aware")]),
        ({}, [(logging.INFO, DEFAULT_HINT)]),
        ({"hint": DEFAULT_HINT}, [(logging.INFO, DEFAULT_HINT)]),
        ({"hint": "bfw", "split": True}, []),
        ({"hint": "bf"}, []),
        ({"strict": "1f1b"}, []),
    ],
    ids=str,
)
def test_a_hint_that_ranks_weight_tasks_logs_one_line_where_there_are_none(
    options: dict[str, Any], lines: list[tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rrfp.pipeline.method")
    with rrfp.local(stages(3), loss_fn=loss_fn, **options).blocking():
        pass
    told = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "rrfp.pipeline.method"]
    text = "the hint {} orders weight tasks, and without split=True there are none: its other rules apply"
    assert told == [(level, text.format(name)) for level, name in lines]


@pytest.mark.parametrize("way", ["hint", "strict"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_schedule_with_weight_tasks_is_refused_and_the_error_says_what_to_write(way: str, schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule '{schedule}', which places weight tasks: add split=True"):
        rrfp.local(stages(2), loss_fn=loss_fn, **{way: schedule})  # type: ignore[arg-type]


def test_one_microbatch_on_a_last_stage_of_several_chunks_is_refused_as_a_limit() -> None:
    parts = [stages(2), stages(2, seed=1)]
    for options in ({}, {"placement": "v"}):
        with pytest.raises(ConfigError, match="limit is '1f1b' with 2 chunks a stage, must be 'n', '2n'"):
            rrfp.local(parts, loss_fn=loss_fn, limit="1f1b", **options)  # type: ignore[arg-type]
    rrfp.local(parts, loss_fn=loss_fn, limit="n")
    rrfp.local(stages(2), loss_fn=loss_fn, limit="1f1b")
