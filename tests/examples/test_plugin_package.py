"""The example package of plugins, installed beside the wheel in a fresh environment, and used by its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import ROOT, Installed, install_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    installed = install_once(tmp_path_factory.mktemp("with_plugins"))
    installed.install(ROOT / "examples" / "plugins")
    return installed


def test_its_names_are_listed_checked_and_used(installed: Installed, tmp_path: Path) -> None:
    for kind, name in (("hint", "short-queue"), ("transport", "uds")):
        listed = json.loads(installed.printed(f"rrfp {kind}s --json", tmp_path))
        assert {entry["name"]: entry["origin"] for entry in listed}[name] == "plugin rrfp-plugin-example"
        checked = json.loads(installed.printed(f"rrfp check {kind} {name} --json", tmp_path))
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
    (own,) = installed.folder.glob("lib/python*/site-packages")
    file = own / "rrfp_broken.py"
    file.write_text(BROKEN)
    done = installed.run("rrfp check hint rrfp_broken:Broken", tmp_path)
    assert done.returncode == 1
    assert f"TypeError: 'method' object is not subscriptable (at {file}:6, in choose)" in done.stdout


@pytest.mark.long
def test_the_demo_trains_with_them_between_processes(installed: Installed, tmp_path: Path) -> None:
    sizes = "--stages 2 --microbatches 4 --steps 1 --warm-up 0"
    printed = installed.printed(f"rrfp demo --hint short-queue --transport uds {sizes} --out pictures", tmp_path)
    assert "short-queue" in printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["pictures"]
