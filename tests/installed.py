"""The built wheel in a fresh virtual environment, as its user has it: nothing of the checkout is on its path.

Third-party packages are those of the environment that runs the tests. They come in by a path file, which Python does
not search for further path files, so the checkout itself, installed there as editable, stays out.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel.

    Attributes:
        folder: its folder.
    """

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its packages are."""
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder)}))

    def install(self, source: Path) -> None:
        """Install one more package from source, without its requirements."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python)]
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*pip, "install", *options, str(source)], check=True, timeout=100)

    def run(self, command: str, cwd: Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
        """Run a command line of the documentation in a folder, as after ``. bin/activate``."""
        words = shlex.split(command)
        if words[0] == "torchrun":  # torch's own script belongs to the other environment
            words = ["python", "-m", "torch.distributed.run", *words[1:]]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        program = self.folder / "bin" / words[0]
        return subprocess.run(
            [str(program), *words[1:]],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def printed(self, command: str, cwd: Path, timeout_s: float = 100) -> str:
        """What a command that must succeed prints."""
        done = self.run(command, cwd, timeout_s)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def install_once(shared: Path) -> Installed:
    """The environment in a folder that several test processes share: the first one makes it."""
    installed = Installed(shared / "installed")
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (installed.folder / "ready").exists():
            venv.create(installed.folder, with_pip=False, symlinks=True, clear=True)
            (installed.packages / "third_party.pth").write_text(sysconfig.get_path("purelib") + "\n")
            installed.install(ROOT)
            (installed.folder / "ready").touch()
    return installed


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A fresh environment with the wheel, made once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
    return install_once(own.parent if is_one_of_many else own)
