"""The page of `rrfp report` in a browser: what it draws, and what it answers to the mouse and the keyboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.shell import rrfp
from matplotlib.colors import to_rgb
from report.browser import Browser
from report.conftest import write

from rrfp.core.usage import WaitCause
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.model.tasks import KINDS, Kind, Task
from rrfp.trace.breakdown import CAUSE_LABELS, idle_waits
from rrfp.trace.spans import StepTrace, TaskSpan

pytestmark = pytest.mark.slow

KIND_COLOURS = {kind: to_rgb(row.colour) for kind, row in KINDS.items()}


@pytest.fixture(scope="session")
def page(trace: Path, plotting: None) -> Path:
    """The report on the trace."""
    return report(trace.with_name("report.html"), trace)


def report(out: Path, *arguments: Path | str) -> Path:
    result = rrfp("report", *arguments, "-o", out)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"written to {out}: open it in a browser\n"
    return out


def chosen_step(browser: Browser, trace: Path, run: int = 0) -> StepTrace:
    """The step that the page shows at first."""
    shown: int = browser.run(f"report.state.step[{run}]")
    return read_chrome(trace)[0].steps[shown]


def place(browser: Browser, task: Task, run: int = 0) -> tuple[float, float, float]:
    """Left, right and middle of a task's row, in pixels of the window."""
    found: dict[str, float] = browser.run(f"report.locate({run}, '{task}')")
    return found["left"], found["right"], found["y"]


def bring(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector('{selector}').scrollIntoView()")
    browser.settle()


def text_of(browser: Browser, selector: str) -> str:
    found: str = browser.run(f"document.querySelector('{selector}').textContent")
    return found


def view(browser: Browser) -> tuple[float, float]:
    """The part of time that is shown, in milliseconds."""
    found: dict[str, Any] = browser.run("({from: report.state.from, to: report.state.to})")
    return found["from"], found["to"]


def near(pixel: np.ndarray, colour: tuple[float, float, float]) -> bool:
    return bool(np.abs(pixel.astype(int) - 255 * np.array(colour)).max() <= 6)


def test_each_task_is_drawn_in_its_place_in_its_colour_and_nothing_is_asked_for(
    browser: Browser, page: Path, trace: Path
) -> None:
    browser.open(page)
    step, pixels = chosen_step(browser, trace), browser.pixels()
    drawn = 0
    for span in step.tasks:
        left, right, y = place(browser, span.task)
        if right - left < 4:
            continue
        # Off the middle, where the number is.
        assert near(pixels[round(y) - 10, round((left + right) / 2)], KIND_COLOURS[span.task.kind]), span.task
        drawn += 1
    assert drawn > len(step.tasks) / 2
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.console == []


def test_pointing_at_a_task_names_it_and_says_why_it_waited(browser: Browser, page: Path, trace: Path) -> None:
    browser.open(page)
    step = chosen_step(browser, trace)
    span, producer = waited_for_message(step)
    left, right, y = place(browser, span.task)
    browser.mouse("mouseMoved", (left + right) / 2, y)
    told = text_of(browser, "#tip")
    kind = KINDS[span.task.kind].label
    assert told.startswith(
        f"{span.task}: {kind} of microbatch {span.task.microbatch} on stage {span.stage}, step {step.step}"
    )
    assert "Before it the stage was idle: " in told
    assert f" {CAUSE_LABELS[WaitCause.INPUT]}" in told
    assert f"Its last input was {producer.task} of stage {producer.stage}: " in told
    pixels = browser.pixels()
    assert pixels[round(y) - 4 : round(y) + 4, round(left) - 2 : round(left) + 3].max(axis=2).min() < 60  # its outline
    wait = next(wait for wait in idle_waits(step, 0) if wait.cause is WaitCause.MEMORY)
    left, right, y = place(
        browser, next(span.task for span in step.tasks if span.stage == 0 and span.start >= wait.end)
    )
    browser.mouse("mouseMoved", left - 2, y)
    assert text_of(browser, "#tip").startswith(f"Idle, memory: stage 0, step {step.step}")
    browser.mouse("mouseMoved", 5, 5)
    assert browser.run("document.getElementById('tip').hidden") is True


def waited_for_message(step: StepTrace) -> tuple[TaskSpan, TaskSpan]:
    """A forward of stage 2 that began when its message came, and what made the message."""
    tasks = {span.task: span for span in step.tasks}
    arrivals = {(message.task, message.target): message.arrived for message in step.messages}
    ends = {wait.end for wait in idle_waits(step, 2) if wait.cause is WaitCause.INPUT}
    for span in step.tasks:
        kind, m, v = span.task
        producer = tasks.get(Task(kind, m, v - 1))
        if kind is Kind.F and span.stage == 2 and span.start in ends and producer is not None:
            arrived = arrivals[producer.task, 2]
            if arrived is not None and abs(arrived - span.start) < 1e-6:
                return span, producer
    raise AssertionError("no task waited for a message")


def test_it_zooms_at_the_mouse_and_moves_when_it_is_dragged(browser: Browser, page: Path, trace: Path) -> None:
    browser.open(page)
    span = waited_for_message(chosen_step(browser, trace))[0]
    left, right, y = place(browser, span.task)
    middle, before = (left + right) / 2, view(browser)
    browser.mouse("mouseWheel", middle, y, deltaX=0, deltaY=-400, modifiers=2)
    browser.settle()
    after = view(browser)
    assert after[1] - after[0] == pytest.approx((before[1] - before[0]) / np.e, rel=0.01)
    zoomed_left, zoomed_right, _ = place(browser, span.task)
    assert zoomed_right - zoomed_left == pytest.approx((right - left) * np.e, rel=0.01)
    assert zoomed_left < middle < zoomed_right
    pixels = browser.pixels()
    for x in (zoomed_left + 3, zoomed_right - 3):
        assert near(pixels[round(y) - 10, round(x)], KIND_COLOURS[span.task.kind])
    browser.mouse("mousePressed", middle, y, button="left", clickCount=1)
    browser.mouse("mouseMoved", middle + 100, y, buttons=1)
    browser.mouse("mouseReleased", middle + 100, y, button="left", clickCount=1)
    browser.settle()
    assert place(browser, span.task)[0] == pytest.approx(zoomed_left + 100, abs=2)
    browser.run("document.getElementById('whole').click()")
    browser.settle()
    assert view(browser) == pytest.approx(before)
    # A wheel without Ctrl scrolls the page.
    browser.mouse("mouseWheel", middle, y, deltaX=0, deltaY=200)
    browser.settle()
    assert view(browser) == pytest.approx(before)


def test_the_keyboard_does_what_the_mouse_does(browser: Browser, page: Path, trace: Path) -> None:
    browser.open(page)
    steps, at_first = read_chrome(trace)[0].steps, view(browser)
    browser.run("document.querySelector('.timeline').focus()")
    browser.press("+")
    assert view(browser)[1] - view(browser)[0] == pytest.approx(0.7 * (at_first[1] - at_first[0]))
    browser.press("ArrowRight")
    assert view(browser)[0] > at_first[0] + 0.2 * (at_first[1] - at_first[0])
    browser.press("0")
    assert view(browser) == pytest.approx(at_first)
    browser.press("9")
    first, last = view(browser)
    assert last - first > 1000 * (steps[-1].end - steps[0].start)
    browser.press("0")
    number = browser.run("report.state.step[0]")
    browser.press("n" if number + 1 < len(steps) else "p")
    step = chosen_step(browser, trace)
    assert abs(step.step - steps[number].step) == 1
    for _ in range(2):
        browser.press("ArrowDown")
    browser.press(".")
    own = sorted((span for span in step.tasks if span.stage == 2), key=lambda span: span.start)
    assert text_of(browser, "#story").startswith(f"{own[0].task}: ")
    browser.press(".")
    assert text_of(browser, "#story").startswith(f"{own[1].task}: ")
    browser.press(",")
    kind, m, v = own[0].task
    browser.press("i")
    assert text_of(browser, "#story").startswith(f"{Task(kind, m, v - 1)}: ")


def test_two_traces_share_a_time_axis_and_have_each_panel_beside_the_other(
    browser: Browser, trace: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "pyramid.json", "slot-aware-pyramid", "2n")
    browser.open(report(tmp_path / "report.html", trace, other, "--no-advice"))
    heads = browser.run("[...document.querySelectorAll('#timelines h3')].map(head => head.textContent)")
    assert heads == [f"{trace}: bf", f"{other}: slot-aware-pyramid"]
    pixels = browser.pixels()
    for run, path in enumerate((trace, other)):
        for span in chosen_step(browser, path, run).tasks[:4]:
            left, right, y = place(browser, span.task, run)
            assert near(pixels[round(y) - 10, round((left + right) / 2)], KIND_COLOURS[span.task.kind])
    for pair in browser.run(
        "[...document.querySelectorAll('.pair')].map(pair => [...pair.children].map(own => own.offsetTop))"
    ):
        assert pair[0] == pair[1]
    # Of like panels both have one scale: here of the memory held, which is 8 in one run and 4 in the other.
    assert browser.run("report.scales().filter(tops => tops[0] !== tops[1])") == []
    advice = browser.run("[...document.querySelectorAll('#panels section')].at(-1).textContent")
    assert f"Not asked for (--no-advice). To ask: rrfp advise {other}" in advice


def test_panels_have_idle_causes_limits_latencies_sizes_and_advice(browser: Browser, page: Path, trace: Path) -> None:
    browser.open(page)
    text = browser.run("document.getElementById('panels').innerText")
    for head in ("Idle stages over time", "Memory", "Latency of messages", "Time of microbatches", "Advice"):
        assert head in text
    assert "it held 4 chunk tasks at most, the limit is 4 (dashed)" in text
    rows = browser.run("[...document.querySelectorAll('#panels table')].map(table => table.rows.length)")
    assert rows[0] == 5  # a head and four stages
    assert rows[1] == 7  # a head and six edges between neighbours
    advice = json.loads(rrfp("advise", trace, "--json").stdout)
    assert advice["causes"][0]["text"] in text
    assert advice["settings"]
    assert all(setting["setting"].removesuffix(",") in text for setting in advice["settings"])


def test_dark_narrow_and_grey(browser: Browser, page: Path, trace: Path) -> None:
    browser.open(page, scheme="dark")
    assert browser.pixels()[4, 4].max() < 40
    browser.run("document.getElementById('theme').click()")
    browser.settle()
    assert browser.pixels()[4, 4].min() > 240
    browser.resize(380, 800)
    browser.settle()
    assert browser.run("document.documentElement.scrollWidth") <= 380
    assert browser.run("document.querySelector('.u-over').clientWidth") > 200
    browser.resize(1400, 900)
    browser.call("Emulation.setEmulatedVisionDeficiency", type="achromatopsia")
    browser.settle()
    step, pixels = chosen_step(browser, trace), browser.pixels()
    greys: dict[Kind, float] = {}
    for span in step.tasks:
        left, right, y = place(browser, span.task)
        if right - left > 6:
            greys[span.task.kind] = float(pixels[round(y) - 10, round((left + right) / 2)].mean())
    ground = float(pixels[4, 4].mean())
    levels = sorted([*greys.values(), ground])
    assert min(np.diff(levels)) > 30


@pytest.mark.long
@pytest.mark.timeout(600)
def test_64_stages_and_512_microbatches_are_drawn(browser: Browser, tmp_path: Path) -> None:
    from report.conftest import simulated

    from rrfp.trace.chrome import write_chrome

    path = tmp_path / "large.json"
    write_chrome(path, simulated("bf", "n", steps=2, stages=64, microbatches=512), name="large")
    browser.open(report(tmp_path / "report.html", path))
    step = chosen_step(browser, path)
    assert len(step.tasks) == 64 * 512 * 2
    for span in step.tasks[:: len(step.tasks) // 20]:
        browser.run("document.querySelector('.timeline').focus()")
        for _ in range(6):  # a task has a third of a pixel at first, and the mouse whole ones: it aims anew each time
            left, right, y = place(browser, span.task)
            browser.mouse("mouseWheel", (left + right) / 2, y, deltaX=0, deltaY=-400, modifiers=2)
            browser.settle()
        left, right, y = place(browser, span.task)
        assert near(browser.pixels()[round(y), round((left + right) / 2)], KIND_COLOURS[span.task.kind])
        browser.press("0")
