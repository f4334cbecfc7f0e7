"""Sets up an environment whose torch is the CUDA build, over the stub of CUDA beside this file. Needs no GPU.

    python tests/gpu/stub/environment.py out/gpu-stub            # `make gpu-test DEVICE=stub` does so
    out/gpu-stub/bin/python -c "import torch; print(torch.cuda.get_device_name())"

It fetches torch's CUDA build of the release in requirements.lock, with NVIDIA's libraries and headers, from the package
index that pip is configured for, and what RRFP's tests import; then it compiles the stub with g++. Whatever that Python
runs, torchrun's ranks included, runs over the stub.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.wheels import minimums  # noqa: E402

#: What is fetched, and what the environment takes on the disk.
FETCHED_GB, NEEDED_GB = 3, 7

#: Written last; holds what the environment was made from.
STAMP = ".ready"

#: torch's libraries ask for functions by this name; those that the stub lacks are refused by name.
_FUNCTIONS = re.compile(r"\b(?:__)?cu(?:da)?[A-Z]\w*")
_OTHER_LIBRARIES = re.compile(r"cu(?:blas|dnn|solver|sparse|fft|rand|pti|File)")


class SetupError(Exception):
    """Why there is no such environment here; one line."""


def torch_release() -> str:
    """The one in requirements.lock."""
    found = re.search(r"^torch==([0-9.]+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def fetch(folder: Path) -> None:
    """Make the environment, with torch and the packages of the tests."""
    release, gigabyte = torch_release(), 10**9
    free = shutil.disk_usage(folder.parent).free // gigabyte
    if free < NEEDED_GB:
        raise SetupError(f"{folder} needs {NEEDED_GB} GB on the disk, and {free} are free")
    sys.stdout.write(
        f"fetching torch {release} for CUDA with NVIDIA's libraries, {FETCHED_GB} GB, into {folder}, where they take "
        "5 GB (make clean removes them)\n"
    )
    sys.stdout.flush()
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    # Three signs: the release as it is, never one for CPUs, whose number ends in +cpu.
    try:
        _pip(folder, f"torch==={release}")
    except subprocess.CalledProcessError as error:
        raise SetupError(f"pip found no torch {release} in its index, or could not fetch it: see above") from error
    _pip(folder, "--constraint", str(ROOT / "requirements.lock"), *minimums())
    if not headers(folder)[0].is_dir():
        raise SetupError(f"the torch {release} of pip's index for {platform.machine()} is no build for CUDA 13")


def _pip(folder: Path, *packages: str) -> None:
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # Gigabytes that another environment hardly needs.
    _run([*pip, "--no-cache-dir", *packages])


def packages(folder: Path) -> Path:
    """The folder of packages in the environment."""
    return folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def headers(folder: Path) -> list[Path]:
    """NVIDIA's, of the runtime; Triton's package has those that they include in turn."""
    site = packages(folder)
    return [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]


def include_options(folder: Path) -> list[str]:
    """What g++ needs to find them."""
    runtime, others = headers(folder)
    return [f"-I{runtime}", "-idirafter", str(others)]


def compile_all(folder: Path) -> None:
    """Compile the libraries, and let each Python of the environment load them."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        raise SetupError("the stub is compiled by g++, which is not here: apt-get install g++")
    built = folder / "lib/cuda_stub"
    built.mkdir(parents=True, exist_ok=True)
    site = packages(folder)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *include_options(folder)]
    versions = built / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    runtime, driver, kernels = built / "libcudart.so.13", built / "libcuda.so.1", built / "libkernels.so"
    named = [f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={versions}"]
    asked = functions_asked_for(site / "torch/lib")
    for library, source, refuse, prefix, more in (
        (runtime, "runtime.cpp", "stub_refuse", ("cuda", "__cuda"), named),
        (driver, "driver.cpp", "stub_refuse_driver", ("cu",), [f"-Wl,-soname,{driver.name}"]),
    ):
        _run(["g++", *options, str(HERE / source), "-o", str(library), *more])
        lacking = sorted(name for name in asked - functions_in(library) if _belongs(name, prefix))
        refused = built / f"refused_{source}"
        refused.write_text(refusing(lacking, refuse))
        _run(["g++", *options, str(HERE / source), str(refused), "-o", str(library), *more])
    torch = site / "torch"
    own = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
    lenient = [option for option in options if option not in ("-Wextra", "-Werror")]  # the headers are torch's
    source = str(HERE / "kernels.cpp")
    _run(["g++", *lenient, *own, source, "-o", str(kernels), "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"])
    _let_it_load(site, runtime, driver, kernels)


def functions_asked_for(folder: Path) -> set[str]:
    """The functions of CUDA's runtime and driver that torch's libraries do not have themselves."""
    asked: set[str] = set()
    for library in folder.glob("*.so"):
        asked |= {name for name in _symbols(library, "--undefined-only") if _FUNCTIONS.fullmatch(name)}
    return {name for name in asked if not _OTHER_LIBRARIES.match(name)}


def functions_in(library: Path) -> set[str]:
    """The functions of CUDA's that a library has."""
    return {name for name in _symbols(library, "--defined-only") if _FUNCTIONS.fullmatch(name)}


def _symbols(library: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", "-D", which, str(library)], check=True, capture_output=True, text=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line.strip()}


def _belongs(name: str, prefix: tuple[str, ...]) -> bool:
    is_of_runtime = name.startswith(("cuda", "__cuda"))
    return is_of_runtime if "cuda" in prefix else not is_of_runtime


def refusing(names: list[str], refuse: str) -> str:
    """Source of functions that refuse; their arguments do not matter to C's calling convention."""
    lines = [f'int {name}() {{ return {refuse}("{name}"); }}' for name in names]
    return "\n".join(['extern "C" {', f"int {refuse}(const char*);", *lines, "}", ""])


def _let_it_load(site: Path, runtime: Path, driver: Path, kernels: Path) -> None:
    # A library that is loaded under the name by which torch asks for CUDA's is taken for it.
    module = f'''
        """Loads the stub of CUDA: RRFP's tests/gpu/stub, compiled by its environment.py."""

        import ctypes

        RUNTIME = ctypes.CDLL({str(runtime)!r}, ctypes.RTLD_GLOBAL)
        DRIVER = ctypes.CDLL({str(driver)!r}, ctypes.RTLD_GLOBAL)


        def load_kernels():
            """torch calls this when it is imported."""
            ctypes.CDLL({str(kernels)!r})
    '''
    (site / "cuda_stub.py").write_text(textwrap.dedent(module).lstrip())
    (site / "cuda_stub.pth").write_text("import cuda_stub\n")
    info = site / "cuda_stub-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda_stub\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ncuda_stub = cuda_stub:load_kernels\n")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def content_of(folder: Path, sources: list[Path]) -> str:
    """What the environment is made from, for the stamp; its own path, to which it is bound, included."""
    return "\n".join([str(folder), torch_release(), *(source.read_text() for source in sources)])


def main() -> int:
    """Set up what is lacking."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the environment")
    folder = parser.parse_args().folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fetched, stamp = folder / ".fetched", folder / STAMP
    try:
        if sys.platform != "linux":
            raise SetupError("the stub needs Linux, whose memfd_create and /proc it uses")
        if not fetched.exists() or fetched.read_text() != content_of(folder, []):
            fetch(folder)
            fetched.write_text(content_of(folder, []))
        content = content_of(folder, [HERE / "environment.py", *sorted(HERE.glob("*.cpp"))])
        if not stamp.exists() or stamp.read_text() != content:
            stamp.unlink(missing_ok=True)
            compile_all(folder)
            stamp.write_text(content)
    except SetupError as error:
        sys.stderr.write(f"gpu-stub: {error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"gpu-stub: {' '.join(map(str, error.cmd[:4]))} ... failed: see above\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
