"""What the comparison with torch.distributed.pipelining is made of; shared by its command and its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rrfp.costs import CostTable, make_costs
from rrfp.pipeline.options import Options

JITTERS = ("J0", "J3")

#: Bytes of every tensor between stages.
NUM_BYTES = 2 << 20

#: torch's schedules by name, and RRFP's methods with the pipeline options that make them.
TORCH_METHODS = ("torch GPipe", "torch 1F1B")
RRFP_METHODS: Mapping[str, Options] = {
    "rrfp strict gpipe": {"strict": "gpipe"},
    "rrfp strict 1f1b": {"strict": "1f1b"},
    "rrfp bf, limit 1f1b": {"hint": "bf", "limit": "1f1b"},
    "rrfp bf, limit 2n": {"hint": "bf", "limit": "2n"},
    "rrfp strict 1f1b, zmq": {"strict": "1f1b", "transport": "zmq"},
    "rrfp bf, limit 2n, zmq": {"hint": "bf", "limit": "2n", "transport": "zmq"},
}
METHODS = (*TORCH_METHODS, *RRFP_METHODS)
BASELINE = "torch 1F1B"


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison.

    Attributes:
        profile: the workload.
        stages: N, one process each.
        microbatches: M.
        rounds: measured rounds; each runs every method once with every jitter.
        seed: of the cost tables.
    """

    profile: str = "mllm"
    stages: int = 4
    microbatches: int = 24
    rounds: int = 5
    seed: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))

    def costs(self, number: int, jitter: str) -> CostTable:
        """What the tasks of round ``number`` take, the same for every method; round 0 warms up."""
        return make_costs(self.profile, self.stages, self.microbatches, seed=self.seed, step=number, jitter=jitter)
