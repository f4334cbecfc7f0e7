"""`rrfp demo`: the options of the demo, which `rrfp.demo` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rrfp.commands.output import Json


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the demo's files.")] = Path("out/demo"),
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to learn; Python's manual by default.")
    ] = None,
    stages: Annotated[int, typer.Option(help="Stages, one process each.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Microbatches a step.")] = 24,
    warm_up: Annotated[int, typer.Option(help="Steps a method that are not measured.")] = 1,
    steps: Annotated[int, typer.Option(help="Measured steps a method.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the model, the data and the emulated durations.")] = 0,
    real_compute: Annotated[bool, typer.Option("--real-compute", help="Do not stretch tasks to a cost table.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Train bitwise the same model by every method.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a small GPT across real processes: fixed-order 1F1B beside readiness-driven dispatch."""
    from rrfp.demo.command import run_demo
    from rrfp.demo.settings import DemoSettings

    settings = DemoSettings(
        out=str(out),
        text=None if text is None else str(text),
        stages=stages,
        microbatches=microbatches,
        warm_up=warm_up,
        steps=steps,
        seed=seed,
        real_compute=real_compute,
        deterministic=deterministic,
    )
    run_demo(settings, as_json=json)
