"""README.md's program and figures, and the commands that docs/reference/cli.md lists first, in an empty folder."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from batches import long
from forked_shell import ForkedShell
from installed import ROOT, Installed

from benchmarks.front_page.run import SEEDS, gains
from rrfp.lab.report import library

README = (ROOT / "README.md").read_text()
COSTS = "costs/mllm-4x8-J0-none-seed0.json"
SECTION = (ROOT / "docs/reference/cli.md").read_text().split("## At a glance")[1].split("## ")[0]
COMMANDS = [
    command.strip()
    for line in re.findall(r"^    (rrfp .+)$", SECTION, re.MULTILINE)
    for command in line.split("   #")[0].split(";")
]
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

#: What shortens a command that would take minutes, and by what; and what stands for one that needs a job that runs,
#: has failed or has recorded several steps.
SHORTER = {
    "rrfp demo": "rrfp demo --stages 2 --microbatches 4 --warm-up 0 --steps 1 --out .",
    "rrfp advise FILE": "rrfp advise --help",
    "rrfp plan FILE --layers layers.json --out plan.json": "rrfp plan --help",
    "rrfp top": "rrfp top --help",
    "rrfp check replay LOG": "rrfp check replay --help",
    "rrfp check faults --runs 1000": "rrfp check faults --runs 20",
    "rrfp check admission": "rrfp check admission --stages 1,2 --microbatches 2 --chunks 1",
    **{each: each.replace("--seeds 5", "--seeds 2 --microbatches 8") for each in COMMANDS if "--seeds 5" in each},
}
#: The names that the reader fills in.
VALUES = {
    "--costs FILE": f"--costs {COSTS}",
    "trace FILE": "trace trace.json",
    "rrfp report FILE": "rrfp report trace.json",
    "rrfp costs FILE": "rrfp costs trace.json --skip-first 0",
    "hint NAME": "hint bf",
    "transport NAME": "transport inproc",
    "lane NAME": "lane thread",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="session")
def folder(shell: ForkedShell | Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, but for a cost file and a trace."""
    folder = tmp_path_factory.mktemp("readme")
    sweep = "rrfp sweep --profile mllm --stages 4 --microbatches 8 --hint bf --limit n --save-costs costs"
    shell.printed(sweep, folder)
    shell.printed(f"rrfp simulate --costs {COSTS} --hint bf --trace trace.json", folder)
    return folder


def test_the_wheel_has_every_file_of_the_package_and_its_command_runs(installed: Installed, tmp_path: Path) -> None:
    where = installed.printed('python -c "import rrfp; print(rrfp.__file__)"', tmp_path)
    package = Path(where.strip()).parent
    assert package.is_relative_to(installed.folder)
    assert _files(package) == _files(ROOT / "rrfp")
    assert "bf" in installed.printed("rrfp hints", tmp_path)


def test_the_section_lists_the_commands() -> None:
    assert len(COMMANDS) >= 12
    assert SHORTER.keys() <= set(COMMANDS)


#: Commands that take long and have a test of their own that always runs.
LONG = ("rrfp demo", "rrfp check transport NAME")


@pytest.mark.parametrize("printed", [long(command) if command in LONG else command for command in COMMANDS])
def test_the_command_runs_as_printed(printed: str, shell: ForkedShell | Installed, folder: Path) -> None:
    if printed.startswith("rrfp report") and not library.PACKAGE.exists():
        pytest.skip(f"{library.NAME} {library.VERSION}, which make setup fetches with npm, is not here")
    command = SHORTER.get(printed, printed)
    for name, value in VALUES.items():
        command = command.replace(name, value)
    assert shell.printed(command, folder).strip()


def test_the_program_runs_as_it_stands(shell: ForkedShell | Installed, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    printed = shell.printed("python train.py", tmp_path)
    assert re.match(r"step 19, loss 0\.\d+, 8 microbatches, ", printed)
    assert PROGRAM in (ROOT / "docs" / "index.md").read_text()


def test_the_pictures_caption_has_the_figures_that_its_benchmark_prints() -> None:
    (same, split) = re.findall(r"(\d\.\d\d)(?= times as long| with a split backward)", README)
    assert f"{statistics.mean(gains(range(SEEDS), 'same memory')):.2f}" == same
    assert f"{statistics.mean(gains(range(SEEDS), 'same memory, split backward')):.2f}" == split


def _files(package: Path) -> set[str]:
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    return {str(path) for path in found if "__pycache__" not in path.parts}
