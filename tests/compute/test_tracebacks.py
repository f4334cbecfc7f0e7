"""Tracebacks begin at the first code that is not this package's."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path
from types import CodeType

import pytest
import torch

import rrfp
from rrfp.compute.tracebacks import place_of, trim

PACKAGE = Path(rrfp.__file__).parent


def raised_in(*files: Path) -> Exception:
    """An error with one frame for each of ``files``, outermost first."""
    namespace: dict[str, object] = {}
    body = "raise ValueError('x')"
    for number, file in enumerate(reversed(files)):
        code: CodeType = compile(f"def call{number}():\n    {body}", str(file), "exec")
        exec(code, namespace)
        body = f"call{number}()"
    with pytest.raises(ValueError, match="x") as caught:
        eval(body, namespace)
    frames = caught.value.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(files[0]):
        frames = frames.tb_next
    return caught.value.with_traceback(frames)


@pytest.mark.parametrize("outside", [Path("/users/model.py"), PACKAGE.with_name("rrfp_plugin") / "hint.py"])
def test_the_leading_frames_of_the_package_are_dropped_and_no_others(outside: Path) -> None:
    """A plugin's package may lie beside this one, under a name that begins like it."""
    error = raised_in(PACKAGE / "runtime" / "x.py", outside)
    trim(error)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_filename == str(outside)
    assert place_of(error).startswith(f"{outside}:2, in call0")


def test_the_callers_own_code_is_named_and_not_the_library_in_which_it_was_raised() -> None:
    libraries = Path(torch.__file__).parent / "nn" / "linear.py", Path(traceback.__file__)
    error = raised_in(PACKAGE / "x.py", Path("/users/model.py"), *libraries)
    assert place_of(error) == "/users/model.py:2, in call2 (in call0 of traceback.py:2)"
    assert place_of(raised_in(*libraries)) == "", "torch calls the module itself"


def test_an_error_of_the_package_itself_keeps_all_frames() -> None:
    error = raised_in(PACKAGE / "runtime" / "x.py", PACKAGE / "core" / "y.py")
    trim(error)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_filename == str(PACKAGE / "runtime" / "x.py")
    assert place_of(error) == ""


@pytest.mark.parametrize(
    ("caught", "said"), [("first", ""), ("second", "rrfp.errors.RrfpError: second"), ("third", "ValueError: third")]
)
def test_of_errors_that_end_the_program_only_those_already_logged_are_not_printed(caught: str, said: str) -> None:
    program = (
        "from rrfp.compute.tracebacks import print_no_traceback\n"
        "from rrfp import RrfpError\n"
        "first, second, third = RrfpError('first'), RrfpError('second'), ValueError('third')\n"
        "print_no_traceback(first)\n"
        f"raise {caught}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1:] == [said][: len(said)]
