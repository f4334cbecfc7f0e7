"""Fault simulation for authors of hints: every run must finish, or end with one error that names its cause.

``run_campaign(range(1000), MyHint)`` makes a thousand small random pipelines under the hint, most of them with a lost,
repeated, late or overtaken message, a latency spike, a rank that pauses or one that dies, and checks how each ends.
``campaign.failed`` holds the seeds that failed, with the reason; ``run_seed(seed, MyHint, trace=print)`` shows one. A
hint for some pipelines only raises `ConfigError` in ``open_step`` on the others; such a run is "unfit".
"""

from rrfp.sim.faults.campaign import Campaign, FaultRun, run_campaign, run_scenario, run_seed
from rrfp.sim.faults.checker import REQUIRED, Ending
from rrfp.sim.faults.faults import Death, Delay, Duplicate, Fault, Lose, MessageId, Pause, Spike, Swap
from rrfp.sim.faults.random_scenario import make_scenario
from rrfp.sim.faults.scenario import Scenario

__all__ = [
    "REQUIRED",
    "Campaign",
    "Death",
    "Delay",
    "Duplicate",
    "Ending",
    "Fault",
    "FaultRun",
    "Lose",
    "MessageId",
    "Pause",
    "Scenario",
    "Spike",
    "Swap",
    "make_scenario",
    "run_campaign",
    "run_scenario",
    "run_seed",
]
