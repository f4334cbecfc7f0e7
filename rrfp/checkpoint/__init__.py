"""Checkpoints of a training run by torch.distributed.checkpoint, which any layout of stages and replicas can load.

Every rank calls `save` (or `async_save`), `load` and `latest` in the same order, with its own modules and optimizer.
All ranks together write one ordinary checkpoint of the whole model.
"""

from __future__ import annotations

from rrfp.checkpoint.folder import latest
from rrfp.checkpoint.loading import Loaded, load
from rrfp.checkpoint.names import Modules, Optimizers
from rrfp.checkpoint.pretrained import save_pretrained
from rrfp.checkpoint.saving import Saving, async_save, save

__all__ = ["Loaded", "Modules", "Optimizers", "Saving", "async_save", "latest", "load", "save", "save_pretrained"]
