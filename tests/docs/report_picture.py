"""docs/report.png, the page of `rrfp report` in a browser: `python tests/docs/report_picture.py` takes it anew."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from cli.shell import rrfp
from PIL import Image
from report.browser import Browser
from report.conftest import write

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "report.png"


def take() -> None:
    """Two runs of one workload, and a task that is pointed at."""
    with TemporaryDirectory() as folder, Browser() as browser:
        os.chdir(folder)
        paths = [write(Path("1f1b.json"), "bf", "1f1b"), write(Path("default.json"), "slot-aware-pyramid", "2n")]
        assert rrfp("report", *paths, "-o", "report.html").exit_code == 0
        browser.open(Path("report.html").resolve(), width=1300)
        end = browser.run("Math.ceil(document.querySelector('#panels section .pair').getBoundingClientRect().bottom)")
        browser.resize(1300, end + 8)
        browser.settle()
        task = browser.run("report.locate(0, 'B4@1')")
        browser.mouse("mouseMoved", (task["left"] + task["right"]) / 2, task["y"])
        browser.settle()
        browser.screenshot().quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


if __name__ == "__main__":
    take()
