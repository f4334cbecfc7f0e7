"""What a GPU machine without network lacks, carried as wheels.

    python benchmarks/gpu/wheels.py download --python 3.12      # where there is a network
    python benchmarks/gpu/wheels.py install                     # on the GPU machine

`download` fetches wheels of everything that RRFP and its GPU tests import, except torch, in the versions of
requirements.lock. `install` unpacks into a folder those that the running interpreter lacks, and nothing else; put that
folder on PYTHONPATH. `make gpu-wheels`, `make gpu-test` and `make gpu-bench` do so. Needs no package but pip.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
WHEELS, SITE = _ROOT / "out" / "gpu-wheels", _ROOT / "out" / "gpu-site"

#: The machine's own: it must fit its driver.
_TORCH = "torch"
#: pip matches the number exactly.
_GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


def minimums() -> dict[str, tuple[int, ...]]:
    """The smallest version of everything that RRFP and its tests require, except torch; () for any."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    matches = [
        _REQUIREMENT.match(text) for text in (*project["dependencies"], *project["optional-dependencies"]["test"])
    ]
    required = {normal(match[1]): numbers(match[2] or "") for match in matches if match is not None}
    del required[_TORCH]
    return required


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[0-9.]*", text)[0]))  # type: ignore[index]


def download(python: str, architecture: str, folder: Path) -> None:
    """Fetch the wheels; a folder of earlier ones is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform=manylinux_{glibc}_{architecture}" for glibc in _GLIBC]
    platforms += [f"--platform=manylinux2014_{architecture}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation=cp"]
    lock = ["--constraint", str(_ROOT / "requirements.lock")]
    _run([*command, f"--python-version={python}", *platforms, *lock, "--dest", str(folder), *minimums()])
    wheels = sorted(folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{len(wheels)} wheels, {total:.0f} MiB, for Python {python} on {architecture}: {folder}")


def install(wheels: Path, folder: Path) -> None:
    """Unpack what this interpreter lacks; a folder of an earlier run is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    required = minimums()
    found = {normal(wheel.name.split("-")[0]): wheel for wheel in sorted(wheels.glob("*.whl"))}
    lacking = [name for name in (*required, *found) if _lacks(name, required.get(name, ()))]
    lacking = list(dict.fromkeys(lacking))
    if absent := [name for name in lacking if name not in found]:
        sys.exit(f"this Python lacks {', '.join(absent)}, and {wheels} has no wheel of it: run make gpu-wheels")
    if lacking:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(folder)]
        _run([sys.executable, "-m", "pip", "install", *options, *(str(found[name]) for name in lacking)])
    print(f"unpacked from wheels: {', '.join(lacking) or 'nothing, all is installed'}")


def _lacks(name: str, minimum: tuple[int, ...]) -> bool:
    try:
        return numbers(version(name)) < minimum
    except PackageNotFoundError:
        return True


def _run(command: list[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("download", help="fetch wheels; needs a network")
    fetch.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="such as 3.12")
    fetch.add_argument("--architecture", default="x86_64")
    unpack = commands.add_parser("install", help="unpack what this interpreter lacks; needs no network")
    unpack.add_argument("--into", type=Path, default=SITE)
    for command in (fetch, unpack):
        command.add_argument("--wheels", type=Path, default=WHEELS)
    arguments = parser.parse_args()
    if arguments.command == "download":
        download(arguments.python, arguments.architecture, arguments.wheels)
    else:
        install(arguments.wheels, arguments.into)


if __name__ == "__main__":
    main()
