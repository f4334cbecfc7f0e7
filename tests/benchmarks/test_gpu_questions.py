"""A question that fails prints its error, and the next one is asked."""

from __future__ import annotations

import io
import time

import pytest
import torch

from benchmarks.gpu.questions import QUESTIONS, Question, ask, header


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_question_that_fails_gives_its_error() -> None:
    out = io.StringIO()
    ask("order", QUESTIONS["order"], out)
    head, *lines, end = out.getvalue().strip().splitlines()
    assert head == "order: streams of the pool do not wait for the default stream?"
    assert lines[-1].startswith("    ! ")
    assert end.startswith("    (exit code 1, ")


def test_a_question_that_hangs_ends_at_its_limit() -> None:
    out = io.StringIO()
    began = time.monotonic()
    ask("order", Question("a question", QUESTIONS["order"].answer, limit_s=0.01), out)
    assert "    (no end within 0.01 s, " in out.getvalue()
    assert time.monotonic() - began < 5


def test_the_header_names_the_versions() -> None:
    assert f"torch {torch.__version__}" in header()
