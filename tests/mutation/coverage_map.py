"""Which tests can notice a change: those that run its line, the quickest first, as far as a budget of time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: The packages that are changed.
PACKAGES = ("rrfp/core", "rrfp/arbiter", "rrfp/runtime")

#: The tests that are asked: those of the packages, and what runs them in virtual time or in threads of one process.
#: Tests in processes of their own are not: what runs there is not seen, and they take long.
TESTS = (
    "tests/core",
    "tests/arbiter",
    "tests/runtime/test_abort.py",
    "tests/runtime/test_all_gather.py",
    "tests/runtime/test_departures.py",
    "tests/runtime/test_grad_finalizer.py",
    "tests/runtime/test_handshake.py",
    "tests/runtime/test_messenger.py",
    "tests/runtime/test_process_watch.py",
    "tests/runtime/test_records.py",
    "tests/runtime/test_status.py",
    "tests/runtime/test_step_report.py",
    "tests/runtime/test_tie_terms.py",
    "tests/runtime/test_tied_reduction.py",
    "tests/hints",
    "tests/schedules",
    "tests/sim/test_explore.py",
    "tests/sim/test_explore_bounds.py",
    "tests/sim/test_explore_rules.py",
    "tests/sim/test_faults.py",
    "tests/sim/test_faults_groups.py",
    "tests/sim/test_faults_one_by_one.py",
    "tests/sim/test_faults_shell.py",
    "tests/sim/test_random_groups.py",
    "tests/sim/test_random_pipelines.py",
    "tests/sim/test_random_rules.py",
    "tests/sim/test_shell_equals_engine.py",
    "tests/sim/test_shell_groups.py",
    "tests/runtime/test_api.py",
    "tests/runtime/test_clipping.py",
    "tests/runtime/test_data_parallel.py",
    "tests/runtime/test_evaluate_in_order.py",
    "tests/runtime/test_failures.py",
    "tests/runtime/test_group_failures.py",
    "tests/runtime/test_groups.py",
    "tests/runtime/test_plugged_in_code.py",
    "tests/runtime/test_ranks_that_differ.py",
    "tests/runtime/test_starting_leaving.py",
    "tests/runtime/test_statistics.py",
    "tests/runtime/test_ties.py",
    "tests/runtime/test_ties_refused.py",
    "tests/runtime/test_virtual_time.py",
    "tests/runtime/test_watchdog.py",
)

#: Tests that take longer are not asked, and a change is given up after tests that take this long together, in seconds.
LONGEST_TEST_S, BUDGET_S = 6.0, 40.0


@dataclass(frozen=True)
class CoverageMap:
    """Tests by line.

    Attributes:
        seconds: how long each test takes.
        lines: by file, then line, the tests that run it; lines that only importing runs have none.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, Sequence[str]]]

    def tests(self, file: str, lines: range) -> list[str]:
        """The tests to ask about a change of these lines, in order."""
        by_line = self.lines.get(file, {})
        found = {test for line in lines for test in by_line.get(line, ())}
        if not found:  # what only importing runs is used by whoever uses the file
            found = {test for tests in by_line.values() for test in tests}
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            total += self.seconds[test]
            if self.seconds[test] > LONGEST_TEST_S or total > BUDGET_S:
                break
            chosen.append(test)
        return chosen


def record(tree: Path, target: Path, tests: Sequence[str] = TESTS) -> CoverageMap:
    """Run ``tests`` of ``tree`` once, watched; leaves what they told in ``target``."""
    from mutation.recording import TARGET, WATCHED

    present = [test for test in tests if (tree / test).exists()]
    options = ["-m", "not long", "-o", "faulthandler_timeout=0", "-p", "no:cacheprovider", "-p", "mutation.recording"]
    command = [sys.executable, "-m", "pytest", "-q", *options, *present]
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{tree / 'tests'}",
        TARGET: str(target),
        WATCHED: ":".join(str(tree / package) for package in PACKAGES),
    }
    # Tests may fail because watching slows them; those are not asked.
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if not target.exists():
        raise RuntimeError(f"the tests could not be run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return load(target)


def load(source: Path) -> CoverageMap:
    """What `record` left in ``source``."""
    told = json.loads(source.read_text())
    return CoverageMap(
        told["seconds"],
        {file: {int(line): tests for line, tests in by_line.items()} for file, by_line in told["lines"].items()},
    )
