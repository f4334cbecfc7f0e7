"""Runs cases, one after the other, on this rank of gloo: ``torch_ranks.py MODULE.CASE ...``.

The last line of its output is JSON: by case, an empty text, or the traceback.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def _case(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(import_module(module), function)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    cases = {name: _case(name) for name in sys.argv[1:]}
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    results = {}
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            case()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
            sys.stderr.write(f"{name}: {results[name]}\n")  # should the other ranks hang now
        gc.collect()  # a schedule that a traceback holds would leave in a later case
        dist.barrier()
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.2f} s\n")
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **results}) + "\n")
    dist.destroy_process_group()


main()
