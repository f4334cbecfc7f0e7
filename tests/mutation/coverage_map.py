"""Which tests can notice a change: those that run its line, the quickest first, as far as a budget of time goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import pytest

#: The packages that are changed.
PACKAGES = ("rrfp/model", "rrfp/memory", "rrfp/core", "rrfp/arbiter", "rrfp/runtime")

#: Tests of the runtime in processes of their own: what runs there is not seen, and they take long.
_IN_PROCESSES = (
    "group_processes",
    "memory",
    "processes",
    "random_kills",
    "save_trace_processes",
    "stuck_processes",
    "tensor_parallel",
    "ties_between_processes",
    "torchrun",
    "what_users_read",
)

_RUNTIME = Path(__file__).resolve().parents[1] / "runtime"

#: The tests that are asked: those of the packages, and what runs them in virtual time or in threads of one process.
TESTS = (
    "tests/core",
    "tests/arbiter",
    "tests/hints",
    "tests/schedules",
    *(f"tests/graphs/test_{name}.py" for name in ("checkpoints", "declared", "names", "step_arguments", "traces")),
    "tests/pipeline/test_grad_scaler.py",
    "tests/sim/test_explore.py",
    "tests/sim/test_explore_bounds.py",
    "tests/sim/test_explore_claims.py",
    "tests/sim/test_explore_rules.py",
    "tests/sim/test_faults.py",
    "tests/sim/test_faults_groups.py",
    "tests/sim/test_faults_one_by_one.py",
    "tests/sim/test_faults_shell.py",
    "tests/sim/test_random_claims.py",
    "tests/sim/test_random_groups.py",
    "tests/sim/test_random_pipelines.py",
    "tests/sim/test_random_rules.py",
    "tests/sim/test_shell_equals_engine.py",
    "tests/sim/test_shell_groups.py",
    "tests/sim/test_shell_groups_stuck.py",
    *sorted(
        f"tests/runtime/{path.name}"
        for path in _RUNTIME.glob("test_*.py")
        if path.stem.removeprefix("test_") not in _IN_PROCESSES
    ),
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
        """The tests to ask about a change of these lines, in order: those of the file's name first."""
        by_line = self.lines.get(file, {})
        found = {test for line in lines for test in by_line.get(line, ())}
        if not found:  # the lines only run at import: ask the tests that run other lines of the file
            found = {test for tests in by_line.values() for test in tests}
        if not found and by_line:  # the file only runs when it is imported: any test may import it
            found = set(self.seconds)
        # They may run it in another process, where no line is seen, or come late among hundreds of quick ones.
        own = {test for test in self.seconds if f"/test_{PurePath(file).stem}.py::" in test}
        chosen, total = [], 0.0
        for test in sorted(found | own, key=lambda test: (test not in own, self.seconds[test], test)):
            if self.seconds[test] > LONGEST_TEST_S:
                continue
            total += self.seconds[test]
            if total > BUDGET_S:
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
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not target.exists():
        raise RuntimeError(f"the tests could not be run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return load(target)


def load(source: Path) -> CoverageMap:
    """What `record` left in ``source``."""
    told = json.loads(source.read_text())
    return CoverageMap(
        told["seconds"],
        {file: {int(line): tests for line, tests in by_line.items()} for file, by_line in told["lines"].items()},
    )
