"""Loads one of four stages from a folder; prints the bytes of the stage, and by how much the resident memory peaked.

A tiny model is loaded before, so that code and tables of libraries, which no model's size changes, do not count."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rrfp

_STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def stage_of(folder: str, index: int) -> Any:
    """One of four, of a model on the meta device, loaded."""
    configuration = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(configuration)
    stage = rrfp.split(skeleton, 4)[index]
    stage.load_pretrained(folder)
    return stage


def main() -> None:
    tiny, folder, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stage_of(tiny, index)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    before = resident("VmRSS")
    stage = stage_of(folder, index)
    part = sum(each.nbytes for each in stage.state_dict().values())
    print(json.dumps({"part": part, "peak": resident("VmHWM") - before}))  # noqa: T201


if __name__ == "__main__":
    main()
