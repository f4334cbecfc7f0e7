"""The example package of plugins, installed beside the wheel in a fresh environment, and used by its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batches import long
from fork_server import fork_server
from forked_shell import ForkedShell
from installed import ROOT, Installed, installed

__all__ = ["fork_server", "installed"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def with_plugins(installed: Installed) -> Installed:
    installed.install(ROOT / "examples" / "plugins")
    return installed


@pytest.mark.parametrize("is_forked", [True, long(False)], ids=["forked", "wheel"])
def test_its_names_are_listed_checked_and_used(is_forked: bool, with_plugins: Installed, tmp_path: Path) -> None:
    shell = ForkedShell(with_plugins.packages) if is_forked else with_plugins
    for kind, name in (("hint", "short-queue"), ("transport", "uds")):
        listed = json.loads(shell.printed(f"rrfp {kind}s --json", tmp_path))
        assert {entry["name"]: entry["origin"] for entry in listed}[name] == "plugin rrfp-plugin-example"
        checked = json.loads(shell.printed(f"rrfp check {kind} {name} --json", tmp_path))
        assert checked["ok"]
        assert not [check for check in checked["checks"] if check["outcome"] == "failed"]
    assert list(tmp_path.iterdir()) == []


BROKEN = """
from rrfp.hints import Hint

class Broken(Hint):
    def choose(self, ready, view):
        return view.num_enqueued[0]
"""


def test_a_broken_plugin_beside_rrfp_is_named_by_file_and_line(installed: Installed, tmp_path: Path) -> None:
    """Its package may be called rrfp_something, and lies in the same folder."""
    file = installed.packages / "rrfp_broken.py"
    file.write_text(BROKEN)
    done = installed.run("rrfp check hint rrfp_broken:Broken", tmp_path)
    assert done.returncode == 1
    assert f"TypeError: 'method' object is not subscriptable (at {file}:6, in choose)" in done.stdout


@pytest.mark.long
def test_the_demo_trains_with_them_between_processes(with_plugins: Installed, tmp_path: Path) -> None:
    sizes = "--stages 2 --microbatches 4 --steps 1 --warm-up 0"
    printed = with_plugins.printed(f"rrfp demo --hint short-queue --transport uds {sizes} --out pictures", tmp_path)
    assert "short-queue" in printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["pictures"]
