"""Runs cases of Megatron, one after the other, on this rank of gloo: ``megatron_ranks.py CASE ...``.

A case is a function of `megatron_behaviour`, or a name of `megatron_cases.CASES`. The last line of output is JSON: by
case, an empty text, or the traceback.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")


def main() -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    from integrations import megatron_behaviour, megatron_cases

    sys.stderr.write(f"import: {time.perf_counter() - began:.2f} s\n")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = {}
    for name in sys.argv[1:]:
        began = time.perf_counter()
        try:
            if name in megatron_cases.CASES:
                megatron_cases.beside_megatron(name)
            else:
                getattr(megatron_behaviour, name)()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
            sys.stderr.write(f"{name}: {results[name]}\n")  # should the other ranks hang now
        gc.collect()
        dist.barrier()
        sys.stderr.write(f"{name}: {time.perf_counter() - began:.2f} s\n")
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **results}) + "\n")
    dist.destroy_process_group()


main()
