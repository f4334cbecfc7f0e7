"""Runs cases of Megatron, one after the other, on ranks of gloo.

``megatron_ranks.py JOBS``, where JOBS is JSON, cases by number of ranks: ``{"2": ["pp2", "overlap"], "4": []}``; under
torchrun ``megatron_ranks.py CASE ...``. A case is a function of `megatron_behaviour`, or a name of
`megatron_cases.CASES`. For each rank the output has a line of JSON: by case, an empty text, or the traceback.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")

#: Of one case, on a machine that has other things to do.
PATIENCE_S = 60


def results_of(cases: list[str]) -> dict[str, Any]:
    """Run the cases on this rank."""
    from integrations import megatron_behaviour, megatron_cases

    results: dict[str, Any] = {"rank": dist.get_rank()}
    for name in cases:
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
    return results


def report_results(report: Connection, cases: list[str]) -> None:
    report.send(results_of(cases))
    dist.barrier()  # the other ranks still need this one


def run_jobs(jobs: dict[str, list[str]]) -> None:
    from integrations import megatron_behaviour, megatron_cases  # noqa: F401 - before ranks are forked
    from integrations.megatron_forks import ranks_of

    for ranks, cases in jobs.items():
        with ranks_of(int(ranks), report_results, cases) as processes:
            for rank, (_, report) in enumerate(processes):
                if not report.poll(PATIENCE_S * len(cases)):
                    sys.exit(f"rank {rank} of {ranks} hangs")
                sys.stdout.write(json.dumps(report.recv()) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        run_jobs(json.loads(sys.argv[1]))
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sys.stdout.write(json.dumps(results_of(sys.argv[1:])) + "\n")
    dist.destroy_process_group()


main()
