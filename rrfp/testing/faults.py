"""Fault simulation for authors of hints: does a hint end every run well, or with one error that names its cause?

``run_campaign(range(1000), MyHint)`` makes a thousand small random pipelines under the hint, most of them with a lost,
repeated, late or overtaken message, a latency spike, a rank that stands still or one that dies, and judges how each
ends. ``campaign.failed`` holds the seeds that failed, and why; ``run_seed(seed, MyHint, trace=print)`` shows one.
A hint that is made for some pipelines only says so by raising `ConfigError` in ``open_step``; such a run is "unfit".
"""

from rrfp.sim.faults.campaign import Campaign, FaultRun, run_campaign, run_scenario, run_seed
from rrfp.sim.faults.checker import REQUIRED, Ending
from rrfp.sim.faults.faults import Death, Delay, Duplicate, Fault, Lose, MessageId, Pause, Spike, Swap
from rrfp.sim.faults.scenario import Scenario, make_scenario

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
