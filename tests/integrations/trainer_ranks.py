"""Trains on this rank, saves, and goes on from the checkpoint in the middle: ``trainer_ranks.py FOLDER``.

The last line of its output is JSON: what both runs logged, and two errors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from integrations.trainers import Rows, arguments, build, data, figures, with_adapters

import rrfp
from rrfp import ConfigError


def main() -> None:
    torch.set_num_threads(1)
    from rrfp.integrations.transformers import PipelineTrainer

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    report: dict[str, object] = {"rank": rank}
    for name, resumed in (("whole", None), ("resumed", str(folder / "checkpoint-10"))):
        model = build()
        args = arguments(folder)
        options = {"deterministic": True}
        with PipelineTrainer(
            model, args, stages=rrfp.split(model, 2), microbatches=3, options=options, **data()
        ) as trainer:
            trainer.train(resume_from_checkpoint=resumed)
            trainer.save_model(str(folder / name))
        report[name] = figures(trainer.state.log_history)
        report["held"] = [key for key, value in model.state_dict().items() if not value.is_meta]
    adapted = with_adapters(build())
    args = arguments(folder, max_steps=2, save_strategy="no", load_best_model_at_end=False)
    stages = rrfp.split(adapted.get_base_model(), 2)
    with PipelineTrainer(adapted, args, stages=stages, microbatches=3, **data()) as trainer:
        trainer.train()
        trainer.save_model(str(folder / "adapters"))
    for name, parts in (("stages", 3), ("dataset", 2)):
        model = build()
        own = {**data(), "train_dataset": Rows(52, shift=rank)}
        try:
            with PipelineTrainer(model, args, stages=rrfp.split(model, parts), microbatches=3, **own) as trainer:
                trainer.train()
        except ConfigError as error:
            report[name] = str(error)
    sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


main()
