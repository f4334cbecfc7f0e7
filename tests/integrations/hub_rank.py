"""A rank that writes its stage of a model into a folder of the Hub; prints what was refused, if anything."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist
from integrations.decoders import build

import rrfp
from rrfp import checkpoint


def main() -> None:
    folder, replicas = sys.argv[1], int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model: Any = build("llama", tie_word_embeddings=True)
    stage = rrfp.split(model, ranks // replicas)[rank // replicas]
    refused = []
    for size in ("0GB", "5GB"):
        try:
            checkpoint.save_pretrained(folder, stage, max_shard_size=size if rank else "5GB")
        except rrfp.ConfigError as error:
            refused.append(str(error))
    paths: dict[str, str] = {}
    for name, own in (("folder", f"{folder}-{rank}"), ("checkpoint", folder if rank else None)):
        try:
            checkpoint.save_pretrained(**{"folder": folder, "modules": stage, name: own})  # type: ignore[arg-type]
        except rrfp.ConfigError as error:
            paths[name] = str(error)
    print(json.dumps({"rank": rank, "refused": refused, "paths": paths}))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
