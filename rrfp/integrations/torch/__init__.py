"""RRFP for users of ``torch.distributed.pipelining``: `ScheduleRRFP`, a schedule over their `PipelineStage` objects."""

from __future__ import annotations

from rrfp.integrations.torch.schedule import ScheduleRRFP

__all__ = ["ScheduleRRFP"]
