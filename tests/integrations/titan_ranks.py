"""Runs cases of `titan_cases`, one after the other, on this rank of gloo: ``titan_ranks.py CASE ...``.

The last line of its output is JSON: by case, an empty text, or the traceback.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback

import torch
import torch.distributed as dist


def main() -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    from integrations import titan_cases

    sys.stderr.write(f"import: {time.perf_counter() - began:.2f} s\n")
    results = {}
    for case in sys.argv[1:]:
        began = time.perf_counter()
        try:
            getattr(titan_cases, case)()
            results[case] = ""
        except BaseException:
            results[case] = traceback.format_exc()
            sys.stderr.write(f"{case}: {results[case]}\n")  # should the other ranks hang now
        gc.collect()
        dist.barrier()
        sys.stderr.write(f"{case}: {time.perf_counter() - began:.2f} s\n")
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **results}) + "\n")
    dist.destroy_process_group()


main()
