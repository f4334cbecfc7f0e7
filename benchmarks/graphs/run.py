"""A multimodal model as a chain, as a branch, and with its encoders beside the language model, at equal bytes.

    python benchmarks/graphs/run.py [--seeds 20] [--stages 4 8] [--hint NAME] [--jobs J] [--quick] [--json]

Simulated: vision, audio and language model of 20, 10 and 50 ms forward on average and twice that backward, 32
microbatches, of which a share has an image and a share a sound (the mean work stays). Branch: the stages of the chain,
and both encoders lead to the language model. Co-located: every stage has an Nth of each part. "Skipped": microbatches
do not visit an encoder that has nothing to do for them; else they visit it for no time. Bytes held are in proportion to
forward time, and every stage of every graph has the same limit: what N = 8 or 2N average microbatches hold on a
stage of 10 ms. All forms meet the same microbatches, and the hint receives planned times as sizes.

A figure is the share of the chain's step time, mean over seeds (from 1000 on) ± its 95% interval; in brackets what an
emulation outside the project found for the same mean costs on PP 8 under bf (its distribution of sizes is another, so
only the order of magnitude is comparable). "Over": by how much a stage passed its limit at most, where that is more
than a single microbatch takes: sizes are expected before they are known. Below the table are the aims that are missed.
`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.graphs.figures import AIMED_SHARES, COMPARED, Figures, Share
from benchmarks.graphs.runs import LIMITS, Case, run_cases
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from rrfp.errors import ConfigError
from rrfp.hints.registry import DEFAULT_HINT, hint_names
from rrfp.lab.sweep.pool import usable_cores

FIRST_SEED = 1000
LATENCIES = ("wire", "spike")
SHARES = ((1.0, 1.0), AIMED_SHARES, (0.3, 0.2))


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("A multimodal model as a chain, a branch, and co-located.")
    parser.add_argument("--seeds", type=int, default=20, help="draws of the microbatches, at least 1")
    parser.add_argument("--stages", type=int, nargs="+", default=[4, 8], help="numbers of stages")
    parser.add_argument("--hint", default=DEFAULT_HINT, choices=hint_names(), help="the hint of all forms")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, at least 1")
    arguments = parsed(parser, "seeds", "jobs")
    if arguments.quick:
        arguments.seeds, arguments.stages = 1, [2]
    return arguments


def table(figures: Figures) -> Table:
    """A row for each PP, latency, shares and limit."""
    heads = ("latency", "images, sounds", "limit", "chain (s)", *COMPARED, "over")
    result = table_of("share of the chain's step time", "PP", *heads)
    for row in figures.rows:
        stages, latency, (images, sounds), limit = row
        cells = (_cell(figures.share(row, form)) for form in COMPARED)
        passed = f"{max(0.0, figures.passed(row)):.0f}%"
        names = (str(stages), latency, f"{images:g}, {sounds:g}", limit)
        result.add_row(*names, f"{figures.chain(row):.3f}", *cells, passed)
    return result


def _cell(share: Share) -> str:
    emulated = "" if share.emulated is None else f" ({share.emulated:.2f})"
    return f"{share.mean:.3f} ± {share.interval:.3f}{emulated}"


def plain(figures: Figures) -> list[dict[str, object]]:
    """Every figure, for programs."""
    return [
        {
            **dict(zip(("stages", "latency", "shares", "limit"), row, strict=True)),
            "chain": figures.chain(row),
            "passed": figures.passed(row),
            **{form: asdict(figures.share(row, form)) for form in COMPARED},
        }
        for row in figures.rows
    ]


def main() -> None:
    """Run and print."""
    arguments = arguments_of()
    load, started = OtherLoad(), time.monotonic()
    cases = [
        Case(stages, latency, shares, limit, seed, arguments.hint)
        for stages in sorted(arguments.stages, reverse=True)  # long ones first: no straggler at the end
        for latency in LATENCIES
        for shares in SHARES
        for limit in LIMITS
        for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    ]
    try:
        figures = Figures(list(run_cases(cases, arguments.jobs)))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    took, missed = time.monotonic() - started, list(figures.missed())
    if arguments.json:
        document = {"hint": arguments.hint, "rows": plain(figures), "missed": missed, "tables": len(cases)}
        print(json.dumps({**document, "seconds": took, "other_load": load.share()}))
        return
    Console(width=max(Console().width, 170)).print(table(figures))
    print("\n".join(("aims that are missed:", *missed)) if missed else "no aim is missed")
    print(f"hint {arguments.hint}, {len(cases)} tables, {took:.0f} s on {arguments.jobs} processes")
    print(load.sentence())


if __name__ == "__main__":
    main()
