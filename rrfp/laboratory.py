"""The ways from the product into the laboratory, all by name: the laboratory is imported when one is used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

#: By module of the product: its public names that are made in the laboratory, and their homes.
PUBLIC: Mapping[str, Mapping[str, str]] = {
    "rrfp.costs": {
        "JITTER_LEVELS": "rrfp.lab.generators.jitter",
        "JitterLevel": "rrfp.lab.generators.jitter",
        "LATENCY_MODELS": "rrfp.lab.generators.latency",
        "PROFILES": "rrfp.lab.generators.workloads",
        "Profile": "rrfp.lab.generators.workloads",
        "make_costs": "rrfp.lab.generators.profiles",
        "microbatch_sizes": "rrfp.lab.generators.profiles",
        "with_jitter": "rrfp.lab.generators.jitter",
        "with_latency": "rrfp.lab.generators.latency",
    },
    "rrfp.testing.clock": {
        "EmulatedStage": "rrfp.lab.emulated",
        "SimulatedTransport": "rrfp.lab.simulated_transport",
        "TimerLane": "rrfp.lab.timer_lane",
        "VirtualClockLoop": "rrfp.lab.virtual_clock",
        "run_virtual": "rrfp.lab.virtual_clock",
    },
    "rrfp.testing.faults": {
        "Campaign": "rrfp.lab.faults.campaign",
        "Death": "rrfp.lab.faults.faults",
        "Delay": "rrfp.lab.faults.faults",
        "Duplicate": "rrfp.lab.faults.faults",
        "Ending": "rrfp.lab.faults.checker",
        "Fault": "rrfp.lab.faults.faults",
        "FaultRun": "rrfp.lab.faults.campaign",
        "Lose": "rrfp.lab.faults.faults",
        "MessageId": "rrfp.lab.faults.faults",
        "Pause": "rrfp.lab.faults.faults",
        "REQUIRED": "rrfp.lab.faults.checker",
        "Scenario": "rrfp.lab.faults.scenario",
        "Spike": "rrfp.lab.faults.faults",
        "Swap": "rrfp.lab.faults.faults",
        "make_scenario": "rrfp.lab.faults.random_scenario",
        "run_campaign": "rrfp.lab.faults.campaign",
        "run_scenario": "rrfp.lab.faults.campaign",
        "run_seed": "rrfp.lab.faults.campaign",
    },
    "rrfp.testing.hint_checks": {
        "ALL_CHECKS": "rrfp.lab.hint_checks",
        "Check": "rrfp.lab.hint_checks",
        "HintFactory": "rrfp.lab.hint_checks",
        "run_hint_checks": "rrfp.lab.hint_checks",
    },
    "rrfp.testing.lane_checks": {"double_lane": "rrfp.lab.lane_makers"},
    "rrfp.testing.reference": {"ReferenceResult": "rrfp.lab.reference", "reference": "rrfp.lab.reference"},
}

#: Commands of the console script, by their names there.
COMMANDS: Mapping[str, str] = {
    "demo": "rrfp.lab.commands.demo:demo",
    "trace": "rrfp.lab.commands.trace:trace",
    "costs": "rrfp.lab.commands.costs:costs",
    "advise": "rrfp.lab.commands.advise:advise",
    "report": "rrfp.lab.commands.report:report",
    "simulate": "rrfp.lab.commands.simulate:simulate",
    "sweep": "rrfp.lab.commands.sweep:sweep",
    "check faults": "rrfp.lab.commands.check_faults:faults",
    "check admission": "rrfp.lab.commands.check_admission:admission",
    "check replay": "rrfp.lab.commands.check_replay:replay",
}

#: Classes of commands whose help and checks are their own.
COMMAND_CLASSES: Mapping[str, str] = {
    "advise": "rrfp.lab.commands.advise:AdviseCommand",
    "simulate": "rrfp.lab.commands.simulate:SimulateCommand",
    "sweep": "rrfp.lab.commands.sweep:SweepCommand",
}

#: Methods of the product that compute in the laboratory.
METHODS: Mapping[str, str] = {
    "Pipeline.advise": "rrfp.lab.advice.advice:AdvisedTrace",
    "Pipeline._repr_html_": "rrfp.lab.report.inline:pipeline_html",
    "StepTrace._repr_html_": "rrfp.lab.report.inline:trace_html",
}

#: By entry point group and name: what the registry of that group takes for built in.
PLUGINS: Mapping[str, Mapping[str, str]] = {
    "rrfp.transports": {"simulated": "rrfp.lab.simulated_transport:SimulatedTransport"},
    "rrfp.lanes": {"timer": "rrfp.lab.lane_makers:timer_lanes", "double": "rrfp.lab.lane_makers:double_lanes"},
}


def public_name(module: str, name: str) -> Any:
    """A module's public name that is made in the laboratory."""
    homes = PUBLIC[module]
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def load(target: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
