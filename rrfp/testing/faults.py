"""Fault simulation for authors of hints: every run must finish, or end with one error that names its cause.

``run_campaign(range(1000), MyHint)`` makes a thousand small random pipelines under the hint, most of them with a lost,
repeated, late or overtaken message, a latency spike, a rank that pauses or one that dies, and checks how each ends.
``campaign.failed`` holds the seeds that failed, with the reason; ``run_seed(seed, MyHint, trace=print)`` shows one. A
hint for some pipelines only raises `ConfigError` in ``open_step`` on the others; such a run is "unfit".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.laboratory import PUBLIC
from rrfp.lazy_names import lazy_names

# For type checkers: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp.lab.faults.campaign import Campaign as Campaign
    from rrfp.lab.faults.campaign import FaultRun as FaultRun
    from rrfp.lab.faults.campaign import run_campaign as run_campaign
    from rrfp.lab.faults.campaign import run_scenario as run_scenario
    from rrfp.lab.faults.campaign import run_seed as run_seed
    from rrfp.lab.faults.checker import REQUIRED as REQUIRED
    from rrfp.lab.faults.checker import Ending as Ending
    from rrfp.lab.faults.faults import Death as Death
    from rrfp.lab.faults.faults import Delay as Delay
    from rrfp.lab.faults.faults import Duplicate as Duplicate
    from rrfp.lab.faults.faults import Fault as Fault
    from rrfp.lab.faults.faults import Lose as Lose
    from rrfp.lab.faults.faults import MessageId as MessageId
    from rrfp.lab.faults.faults import Pause as Pause
    from rrfp.lab.faults.faults import Spike as Spike
    from rrfp.lab.faults.faults import Swap as Swap
    from rrfp.lab.faults.random_scenario import make_scenario as make_scenario
    from rrfp.lab.faults.scenario import Scenario as Scenario

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC[__name__])
