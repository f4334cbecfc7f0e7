"""The ways from the product into the laboratory, all by name: the laboratory is imported when one is used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rrfp.lazy_names import homes_of

#: By module of the product: its public names that are made in the laboratory, and their homes.
PUBLIC: Mapping[str, Mapping[str, str]] = {
    "rrfp.costs": homes_of(
        {
            "rrfp.lab.generators.jitter": "JITTER_LEVELS JitterLevel with_jitter",
            "rrfp.lab.generators.latency": "LATENCY_MODELS with_latency",
            "rrfp.lab.generators.profiles": "make_costs microbatch_sizes",
            "rrfp.lab.generators.workloads": "PROFILES Profile",
        }
    ),
    "rrfp.testing.clock": homes_of(
        {
            "rrfp.lab.emulated": "EmulatedStage",
            "rrfp.lab.simulated_transport": "SimulatedTransport",
            "rrfp.lab.timer_lane": "TimerLane",
            "rrfp.lab.virtual_clock": "VirtualClockLoop run_virtual",
        }
    ),
    "rrfp.testing.faults": homes_of(
        {
            "rrfp.lab.faults.campaign": "Campaign FaultRun run_campaign run_scenario run_seed",
            "rrfp.lab.faults.checker": "Ending REQUIRED",
            "rrfp.lab.faults.faults": "Death Delay Duplicate Fault Lose MessageId Pause Spike Swap",
            "rrfp.lab.faults.random_scenario": "make_scenario",
            "rrfp.lab.faults.scenario": "Scenario",
        }
    ),
    "rrfp.testing.hint_checks": homes_of({"rrfp.lab.hint_checks": "ALL_CHECKS Check HintFactory run_hint_checks"}),
    "rrfp.testing.lane_checks": homes_of({"rrfp.lab.lane_makers": "double_lane"}),
    "rrfp.testing.reference": homes_of({"rrfp.lab.reference": "ReferenceResult reference"}),
}

#: Commands of the console script, by their names there.
COMMANDS: Mapping[str, str] = {
    "demo": "rrfp.lab.commands.demo:demo",
    "trace": "rrfp.lab.commands.trace:trace",
    "costs": "rrfp.lab.commands.costs:costs",
    "advise": "rrfp.lab.commands.advise:advise",
    "plan": "rrfp.lab.commands.plan:plan",
    "report": "rrfp.lab.commands.report:report",
    "simulate": "rrfp.lab.commands.simulate:simulate",
    "sweep": "rrfp.lab.commands.sweep:sweep",
    "check faults": "rrfp.lab.commands.check_faults:faults",
    "check admission": "rrfp.lab.commands.check_admission:admission",
    "check replay": "rrfp.lab.commands.check_replay:replay",
}

#: Classes of commands whose help and checks are their own.
COMMAND_CLASSES: Mapping[str, str] = {
    "advise": "rrfp.lab.commands.options:ReplayCommand",
    "plan": "rrfp.lab.commands.options:ReplayCommand",
    "simulate": "rrfp.lab.commands.simulate:SimulateCommand",
    "sweep": "rrfp.lab.commands.sweep:SweepCommand",
}

#: Methods of the product that compute in the laboratory.
METHODS: Mapping[str, str] = {
    "Pipeline.advise": "rrfp.lab.advice.advice:AdvisedTrace",
    "Pipeline._repr_html_": "rrfp.lab.report.inline:pipeline_html",
    "Recording.replay": "rrfp.lab.replay:replay",
    "StepTrace._repr_html_": "rrfp.lab.report.inline:trace_html",
}

#: By entry point group and name: what the registry of that group takes for built in.
PLUGINS: Mapping[str, Mapping[str, str]] = {
    "rrfp.transports": {"simulated": "rrfp.lab.simulated_transport:SimulatedTransport"},
    "rrfp.lanes": {"timer": "rrfp.lab.lane_makers:timer_lanes", "double": "rrfp.lab.lane_makers:double_lanes"},
}


def load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
