"""`rrfp demo`: the options of the demo, which `rrfp.lab.demo` runs."""

from pathlib import Path
from typing import Annotated

import typer

from rrfp.commands.command_line import Json, known_hints, known_transports
from rrfp.lab.commands.options import METHOD, option
from rrfp.lab.sweep.experiment import HINT_FORMS

_HINT = f"Hints of the readiness-driven rows, instead of the demo's four: {HINT_FORMS}; several between commas."
_LIMIT = (
    "Microbatches a stage may hold in these rows: a number, 1f1b (N - i on stage i), n or 2n. Default 2n; the row v "
    "keeps n."
)
_SPLIT = "Whether these rows split backward. Default: bfw and slot-aware do; with --hint none does."
_TRANSPORT = (
    "Transport of all rows, between processes: a name that `rrfp transports` lists, module:attribute, or "
    "file.py:attribute."
)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the demo's files.")] = Path("out/demo"),
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to learn; Python's manual by default.")
    ] = None,
    stages: Annotated[int, typer.Option(metavar="N", help="Stages, one process each.")] = 4,
    microbatches: Annotated[int, typer.Option(metavar="M", help="Microbatches a step.")] = 24,
    warm_up: Annotated[int, typer.Option(metavar="K", help="Steps a method that are not measured.")] = 1,
    steps: Annotated[int, typer.Option(metavar="K", help="Measured steps a method.")] = 8,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the model, the data and the emulated durations.")] = 0,
    hint: Annotated[str | None, option("hint", "NAME", _HINT, METHOD, values=known_hints)] = None,
    limit: Annotated[
        str | None, option("limit", "K|1f1b|n|2n", _LIMIT, METHOD, values=lambda: ("1f1b", "n", "2n"))
    ] = None,
    split: Annotated[bool | None, typer.Option("--split/--no-split", help=_SPLIT, rich_help_panel=METHOD)] = None,
    transport: Annotated[str, option("transport", "NAME", _TRANSPORT, METHOD, values=known_transports)] = "auto",
    real_compute: Annotated[bool, typer.Option("--real-compute", help="Do not stretch tasks to a cost table.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Train bitwise the same model by every method.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a small GPT across real processes: fixed-order 1F1B beside readiness-driven dispatch."""
    from rrfp.lab.demo.settings import DemoSettings

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
        hint=hint,
        limit=limit,
        split=split,
        transport=transport,
    )
    from rrfp.lab.demo.command import run_demo

    run_demo(settings, as_json=json)
