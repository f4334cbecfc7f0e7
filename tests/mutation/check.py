"""The mutation check: do the tests notice when the code is wrong?

    make mutation                                the named mutants, then 300 drawn from seed 0
    make mutation ARGS="--named-only"
    make mutation ARGS="--seed 7 --number 50 --workers 4"

Exit code 1 if a named mutant gets past one of the guards that are there for it, or if a drawn one survives that
tests/mutation/survivors.toml does not list.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutation import coverage_map
from mutation.coverage_map import CoverageMap
from mutation.draw import Mutant, as_entry, draw, known_survivors, mutants_of
from mutation.named import NAMED, Guard, Named
from mutation.trial import Fate, changed, copy_tree, run_command, run_tests

TREE = Path(__file__).resolve().parents[2]

#: What a guard, or the tests of a drawn mutant, may take beyond what they take on the unchanged tree, in seconds.
GUARD_TIMEOUT_S, GRACE_S = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing to try: a file's new text, and what must fail.

    Attributes:
        file: its path inside the tree.
        text: what it says.
        guard: what is run.
        timeout_s: for how long at most, in seconds.
    """

    file: str
    text: str
    guard: Guard
    timeout_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    options = _options(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rrfp-mutation-") as folder:
        base = copy_tree(TREE, Path(folder) / "base")
        failures = _try_named(base, options) if not options.drawn_only else []
        if not options.named_only:
            failures += _try_drawn(base, Path(folder), options)
    _say(f"{len(failures)} failed, {time.monotonic() - began:.0f} s")
    for failure in failures:
        _say(f"FAILED {failure}")
    return int(bool(failures))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutation")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn mutants")
    parser.add_argument("--number", type=int, default=300, help="of drawn mutants")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of the drawn mutants")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--packages", nargs="+", default=list(coverage_map.PACKAGES), help="where mutants are drawn")
    parser.add_argument("--tests", nargs="+", default=list(coverage_map.TESTS), help="what is asked of drawn mutants")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--named-only", action="store_true", help="leave the drawn mutants out")
    which.add_argument("--drawn-only", action="store_true", help="leave the named mutants out")
    parser.add_argument("--only", default="", help="named mutants with this in their name")
    parser.add_argument(
        "--map", type=Path, help="a file to keep the coverage map in, and to take it from if it is there"
    )
    parser.add_argument("--survivors", type=Path, help="write unlisted survivors here, as entries of the list")
    return parser.parse_args(arguments)


def _try_named(base: Path, options: argparse.Namespace) -> list[str]:
    pairs = [(named, guard) for named in NAMED if options.only in named.name for guard in named.guards]
    trials = [
        Trial(named.file, named.applied((base / named.file).read_text()), guard, GUARD_TIMEOUT_S)
        for named, guard in pairs
    ]
    failures = _unsound(base, sorted({guard for _, guard in pairs}), GUARD_TIMEOUT_S, options.workers)
    for (named, guard), (fate, said) in zip(pairs, _tried(base, trials, options.workers), strict=True):
        _say(f"{fate}: {named.name}: {' '.join(guard)}")
        if fate is Fate.SURVIVED or _is_broken(said):
            failures.append(f"{named.name}: passes {' '.join(guard)}")
    return failures


def _unsound(base: Path, guards: Sequence[Guard], timeout_s: float, workers: int) -> list[str]:
    """Guards that fail with nothing changed: they can show nothing."""
    file = "rrfp/version.py"
    trials = [Trial(file, (base / file).read_text(), guard, timeout_s) for guard in guards]
    return [
        f"{' '.join(guard)[:200]}: {fate} with nothing changed: {said[-500:]}"
        for guard, (fate, said) in zip(guards, _tried(base, trials, workers), strict=True)
        if fate is not Fate.SURVIVED
    ]


def _is_broken(said: str) -> bool:
    """Whether nothing was tried: the tests named do not exist."""
    return "ERROR: not found" in said or "ERROR: file or directory not found" in said or "no tests ran" in said


def _try_drawn(base: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    mutants = draw([*mutants_of(base, options.packages)], options.seed, options.number)[options.first :]
    tests = _map(base, folder, options)
    chosen = [tests.tests(mutant.file, _lines(base, mutant)) for mutant in mutants]
    trials = [
        Trial(
            mutant.file,
            mutant.change.applied((base / mutant.file).read_text()),
            ("pytest", *asked),
            GRACE_S + 4 * sum(tests.seconds[test] for test in asked),
        )
        for mutant, asked in zip(mutants, chosen, strict=True)
    ]
    everything = sorted({test for asked in chosen for test in asked})
    halves = [("pytest", *everything[start::2]) for start in range(2)]
    total_s = GRACE_S + 4 * sum(tests.seconds[test] for test in everything)
    if unsound := _unsound(base, halves, total_s, options.workers):
        return unsound
    listed, fates, unlisted = known_survivors(), Counter[str](), []
    for mutant, (fate, _) in zip(mutants, _tried(base, trials, options.workers), strict=True):
        is_listed = mutant.key in listed
        fates[f"{fate}, listed" if is_listed else fate] += 1
        _say(f"{fate}{' (listed)' if is_listed else ''}: {mutant}")
        if fate in (Fate.SURVIVED, Fate.UNTESTED) and not is_listed:
            unlisted.append(mutant)
    _say(f"{len(mutants)} drawn from seed {options.seed}: {', '.join(f'{n} {fate}' for fate, n in fates.items())}")
    if options.survivors is not None:
        options.survivors.write_text("\n\n".join(map(as_entry, unlisted)) + "\n")
    return [f"{mutant} survives, and is not listed" for mutant in unlisted]


def _map(base: Path, folder: Path, options: argparse.Namespace) -> CoverageMap:
    if options.map is not None and options.map.exists():
        return coverage_map.load(options.map)
    _say("running the tests once, to see which run which lines")
    began = time.monotonic()
    tests = coverage_map.record(base, options.map or folder / "map.json", options.tests)
    _say(f"{len(tests.seconds)} tests, {time.monotonic() - began:.0f} s")
    return tests


def _lines(base: Path, mutant: Mutant) -> range:
    source = (base / mutant.file).read_text()
    first, last = (source.count("\n", 0, at) + 1 for at in mutant.change.span)
    return range(first, last + 1)


def _tried(base: Path, trials: Sequence[Trial], workers: int) -> Iterator[tuple[Fate, str]]:
    """What became of each, in order, as soon as it is known; each worker has a copy of the tree."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rrfp-mutation-") as folder:
        pool = ProcessPoolExecutor(workers, context, _prepare, (base, Path(folder)))
        with pool:
            yield from pool.map(_try, trials)


_copy: Path


def _prepare(base: Path, folder: Path) -> None:
    """A worker begins."""
    global _copy
    os.nice(5)
    _copy = copy_tree(base, folder / str(os.getpid()))


def _try(trial: Trial) -> tuple[Fate, str]:
    program, *words = trial.guard
    if not words:
        return Fate.UNTESTED, ""
    with changed(_copy / trial.file, trial.text):
        return (run_command if program == "rrfp" else run_tests)(_copy, words, trial.timeout_s)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


__all__ = ["Mutant", "Named", "main"]

if __name__ == "__main__":
    sys.exit(main())
