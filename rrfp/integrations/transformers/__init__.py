"""RRFP for users of transformers: `PipelineTrainer`. (`rrfp.split` cuts the models.)"""

from __future__ import annotations

from rrfp.integrations.transformers.trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
