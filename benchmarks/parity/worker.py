"""One rank of the parity experiment, started by torchrun: trainings one after the other, a line of JSON for each."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parity.settings import GPT, METHODS, Method, Runtime, Settings
from benchmarks.parity.training import Training, train

#: While one process trains, the others wait for it.
_PATIENCE = timedelta(hours=2)


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    settings = Settings.from_json(sys.argv[1])
    with ExitStack() as outer:
        if settings.model == GPT:
            from benchmarks.parity.gpt import GptTraining

            GptTraining.prepare(outer)
        for name in settings.methods:
            method = METHODS[settings.model][name]
            with ExitStack() as stack:
                outcome = train(settings, method, _training(settings, method, stack))
            dist.barrier()
            if dist.get_rank() == 0:
                line = {"model": settings.model, "seed": settings.seed, "method": name, **outcome}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    dist.destroy_process_group()


def _training(settings: Settings, method: Method, stack: ExitStack) -> Training[Any] | None:
    if method.runtime is Runtime.ONE_PROCESS and dist.get_rank():
        return None
    if settings.model == GPT:
        from benchmarks.parity.gpt import GptTraining

        return GptTraining(settings, method, stack)
    from benchmarks.parity.multimodal import MultimodalTraining

    return MultimodalTraining(settings, method, stack)


if __name__ == "__main__":
    main()
