"""The functions of the stub of CUDA are those of NVIDIA's headers, with the same arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpu.stub import environment

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "out/gpu-stub"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (FOLDER / environment.STAMP).exists(), reason="out/gpu-stub is not there: `make gpu-stub` fetches 3 GB"
    ),
]


@pytest.mark.parametrize("source", ["runtime.cpp", "driver.cpp"])
def test_each_function_is_declared_as_in_the_header(source: str) -> None:
    """C++ refuses a function of C whose arguments are not those of its declaration."""
    path = ROOT / "tests/gpu/stub" / source
    options = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *environment.include_options(FOLDER)]
    done = subprocess.run(["g++", *options, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wrong = path.read_text().replace("int* device", "long* device", 1).replace("CUdevice* device", "long* device", 1)
    done = subprocess.run(["g++", *options, "-x", "c++", "-"], input=wrong, capture_output=True, text=True, check=False)
    assert "conflicting declaration" in done.stderr


@pytest.mark.parametrize("library", ["libcudart.so.13", "libcuda.so.1"])
def test_no_function_has_a_name_that_cuda_lacks(library: str) -> None:
    ours = environment.functions_in(FOLDER / "lib/cuda_stub" / library)
    if library == "libcudart.so.13":
        site = environment.packages(FOLDER)
        theirs = environment.functions_in(site / "nvidia/cu13/lib" / library)
    else:
        text = (environment.headers(FOLDER)[0] / "cuda.h").read_text()
        theirs = {name for name in ours if f"{name}(" in text or f"{name.removesuffix('_v2')}(" in text}
    assert len(ours) > 20
    assert ours <= theirs


def test_torch_asks_for_no_function_that_the_stub_neither_has_nor_refuses() -> None:
    built = FOLDER / "lib/cuda_stub"
    ours = environment.functions_in(built / "libcudart.so.13") | environment.functions_in(built / "libcuda.so.1")
    asked = environment.functions_asked_for(environment.packages(FOLDER) / "torch/lib")
    assert len(asked) > 100
    assert asked <= ours
