"""Kills a random rank of four that train under Megatron, at a random moment: ``megatron_kills.py SEED ...``.

Megatron is imported once; the ranks of each run are forked. A line of JSON for each seed: the rank that was killed, and
of each survivor what it raised, and which rank that names.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

from integrations.megatron_cases import FREE, laid_out
from integrations.megatron_forks import ranks_of
from integrations.megatron_parts import Setup, Trainer

from rrfp.integrations.megatron import forward_backward_func

SETUP = Setup(pp=4, ddp="none")
#: Within so many seconds the survivors have ended.
PATIENCE_S = 15.0


def train(report: Connection) -> None:
    """Train until another rank is lost."""
    try:
        with laid_out(SETUP):
            run, trainer, step = forward_backward_func(**FREE), Trainer(SETUP), 0
            while True:
                trainer.step(run, step)
                step += 1
                if step == 2:
                    report.send("trains")
    except BaseException as error:
        report.send((type(error).__name__, getattr(error, "global_rank", None), str(error)))


def kill_one(seed: int) -> dict[str, Any]:
    chosen = random.Random(seed)
    victim, delay = chosen.randrange(SETUP.ranks), chosen.uniform(0, 0.5)
    with ranks_of(SETUP.ranks, train) as ranks:
        for _, report in ranks:
            assert report.poll(2 * PATIENCE_S), "no step ended"
            assert report.recv() == "trains"
        time.sleep(delay)
        os.kill(ranks[victim][0], signal.SIGKILL)
        until, raised = time.monotonic() + PATIENCE_S, []
        for rank, (_, report) in enumerate(ranks):
            if rank != victim:
                ended = report.poll(max(0.0, until - time.monotonic()))
                raised.append(report.recv() if ended else ("hangs", None, ""))
        return {"seed": seed, "victim": victim, "raised": raised}


warnings.filterwarnings("ignore")
for number in map(int, sys.argv[1:]):
    sys.stdout.write(json.dumps(kill_one(number)) + "\n")
    sys.stdout.flush()
