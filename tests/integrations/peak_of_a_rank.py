"""Prints by how much the resident memory peaked, and the bytes of the entries: of a stage that is loaded from a folder,
one of four, or of a whole model that is written from a checkpoint.

A tiny model goes first, so that code and tables of libraries, which no model's size changes, do not count.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rrfp
from rrfp import checkpoint

_STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def stages_of(folder: str, count: int) -> Any:
    """Of a model on the meta device."""
    configuration = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return rrfp.split(AutoModelForCausalLM.from_config(configuration), count)


def loaded(folder: str, index: int) -> Any:
    stage = stages_of(folder, 4)[index]
    stage.load_pretrained(folder)
    return stage


def written(folder: str) -> Any:
    stages = stages_of(folder, 1)
    checkpoint.save_pretrained(f"{folder}/new", stages, checkpoint=f"{folder}/runs", max_shard_size="20MB")
    return stages[0]


def main() -> None:
    tiny, folder, task = sys.argv[1:]
    run = partial(loaded, index=int(task)) if task.isdecimal() else written
    run(tiny)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    before = resident("VmRSS")
    part = sum(each.nbytes for each in run(folder).state_dict().values())
    print(json.dumps({"part": part, "peak": resident("VmHWM") - before}))  # noqa: T201


if __name__ == "__main__":
    main()
