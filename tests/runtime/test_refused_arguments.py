"""OptionArguments of a pipeline and arguments of its calls that do not fit are refused, and what was right goes on."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, stages

import rrfp
from rrfp.errors import ConfigError
from rrfp.pipeline.options import OptionArguments, Options, complete

BAD_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"inputs": 7}, "inputs is of type int, must be a list"),
    ({"inputs": torch.zeros(3)}, "inputs is of type Tensor, must be a list"),
    ({"inputs": [], "targets": []}, "inputs is empty, must hold at least 1 microbatch"),
    ({"inputs": None, "targets": None, "microbatches": 0}, "microbatches is 0, must be a whole number 1..1000000"),
    ({"microbatches": 3}, "microbatches: 3"),
    ({"microbatches": 2.5}, "microbatches is 2.5"),
    ({"targets": [1]}, "targets: 1"),
    ({"targets": None}, "targets is missing, must be a list of 2 on the rank that computes the loss"),
    ({"weights": [1.0]}, "weights: 1"),
    ({"kwargs": [{}, None]}, "kwargs[1] is of type NoneType, must be a dict"),
    ({"weights": [0.0, 0.0]}, "weights sum to 0"),
    ({"weights": [1.0, float("nan")]}, "nan"),
    ({"grad_scale": float("inf")}, "grad_scale is inf"),
    (
        {"target": [1, 2]},
        "unknown argument 'target' (did you mean 'targets'?), must be one of: inputs, targets, grad_scale, kwargs",
    ),
]


def test_bad_arguments_are_refused_and_the_pipeline_goes_on() -> None:
    actual, expected, batch = stages(2), stages(2), data(2)
    with rrfp.local(actual, loss_fn=loss_fn).blocking() as pipe:
        for change, message in BAD_STEPS:
            arguments: Any = {"inputs": batch.inputs, "targets": batch.targets, **change}
            with pytest.raises(ConfigError) as caught:
                pipe.step(**arguments)
            assert message in str(caught.value)
        with pytest.raises(ConfigError, match="unknown argument 'grad_scale'"):
            pipe.evaluate(batch.inputs, grad_scale=2.0)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="microbatches is needed"):
            pipe.step()
        with torch.no_grad(), pytest.raises(ConfigError, match="use evaluate"):
            pipe.step(batch.inputs, batch.targets)
        assert pipe.step(batch.inputs, batch.targets).step == 0
    expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE


class NotAHint:
    """Has what a hint has, and is none."""


class NotAHintEither:
    """Is no hint, and cannot be made without an argument."""

    def __init__(self, argument: int) -> None: ...


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"hints": "bf"}, "unknown option 'hints' (did you mean 'hint'?): docs/reference/options.md has all"),
    ({"tise": {}}, "unknown option 'tise' (did you mean 'ties'?): docs/"),
    ({"hints": "bf", "zzz": 1}, "'hints' (did you mean 'hint'?), 'zzz', must be one of: transport, hint"),
    ({"zzz": 1}, "unknown option 'zzz', must be one of: transport, hint"),
    ({"microbatches": 8}, "unknown option 'microbatches' (write step(..., microbatches=...)): docs/reference/opt"),
    ({"n_microbatches": 8, "zzz": 1}, "(write step(..., microbatches=...)), 'zzz', must be one of: transport, hint"),
    ({"hint": "best"}, "hint is 'best', must be one of: bf, fb"),
    ({"hint": "slotaware"}, "hint is 'slotaware' (did you mean 'slot-aware'?), must be one of: bf, fb"),
    ({"hint": "best"}, "interleaved-1f1b, zb-h1, zb-v, or a subclass of rrfp.Hint or its instance"),
    ({"hint": object()}, "hint is of type object, must be a name, or a subclass of rrfp.Hint or its instance"),
    ({"hint": NotAHint}, f"hint is of type NotAHint ({__file__}), must be a name, or a subclass of rrfp.Hint or its"),
    ({"hint": NotAHintEither}, f"hint is of type NotAHintEither ({__file__}), must be a name, or a subclass of"),
    ({"strict": "bf"}, "strict is 'bf', must be one of: gpipe, 1f1b"),
    ({"strict": "1f1b", "limit": 2}, "neither hint nor limit"),
    ({"limit": 0}, "limit: microbatches is 0, must be a whole number >= 1, or None"),
    (
        {"limit": "3n"},
        "limit is '3n', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size such as",
    ),
    ({"limit": "1.5GB"}, "1f1b, n, 2n, auto, or a size such as 8GB, or an rrfp.Limit"),
    ({"strict": "1F1B"}, "strict is '1F1B' (did you mean '1f1b'?), must be one of: gpipe, 1f1b"),
    ({"transport": "shmm"}, "transport is 'shmm' (did you mean 'shm'?), must be a factory or one of: auto"),
    ({"transport": "smh"}, "transport is 'smh' (did you mean 'shm'?), must be a factory or one of: auto"),
    ({"transport": "tcp"}, "transport is 'tcp', must be a factory or one of: auto, inproc, shm, zmq"),
    ({"transport": 5}, "transport is 5"),
    ({"reduction": "max"}, "reduction is 'max', must be one of: mean, sum"),
    ({"loss_fn": 3}, "loss_fn is 3, must be callable"),
    ({"stall_after": 0}, "stall_after is 0"),
    ({"stall_after": "soon"}, "stall_after is 'soon'"),
    ({"stall_after": True}, "stall_after is True"),
    ({"stall_after": float("inf")}, "stall_after is inf, must be a finite number above 0"),
    ({"connect_timeout": float("inf")}, "connect_timeout is inf, must be a finite number above 0"),
    ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
    ({"abort_after": 0}, "abort_after is 0, must be a finite number above 0, or None for never"),
    ({"abort_after": "soon"}, "abort_after is 'soon'"),
    ({"lock_watch": None}, "lock_watch is None, must be True or False"),
    ({"heartbeat": 0}, "heartbeat is 0, must be a finite number above 0"),
    ({"patience": 1}, "patience is 1, must be at least three times heartbeat, which is 0.5"),
    ({"patience": float("inf")}, "patience is inf"),
    ({"queue_bytes": -1}, "queue_bytes is -1, must be an integer >= 1"),
    ({"max_message_bytes": 1e9}, "max_message_bytes is 1000000000.0, must be an integer >= 1"),
    ({"lane_nice": 40}, "lane_nice is 40, must be 0..19"),
    ({"lane_nice": True}, "lane_nice is True, must be 0..19"),
    ({"seed": "torch"}, "seed is 'torch', must be an integer of 64 bits, or None for torch's"),
    ({"seed": 2**64}, "seed is 18446744073709551616, must be an integer of 64 bits"),
    ({"depth": 10**30}, "depth is 1000000000000000000000000000000, must be an integer of 64 bits"),
    ({"partition": "\ud800"}, r"partition is '\ud800', must be a text or None"),
    ({"event_log": "a\0b"}, r"event_log is 'a\x00b', must be a folder, or None"),
    ({"replay": "\ud800"}, r"replay is '\ud800', must be a folder, or None"),
    ({"strict": ["1f1b"]}, r"strict is ['1f1b'], must be one of: gpipe, 1f1b"),
    ({"hint": "BF"}, "hint is 'BF' (did you mean 'bf'?)"),
    ({"replay": "/nowhere"}, "replay /nowhere: /nowhere/events-rank0.jsonl: cannot be read"),
    ({"event_log": "/dev/null/logs"}, "event_log is '/dev/null/logs': cannot be made (Not a directory)"),
    ({"split": 1}, "split is 1, must be True or False"),
    ({"unsplittable": "half"}, "unsplittable is 'half', must be one of: whole, refuse"),
    ({"chunks": 0}, "chunks is 0, must be an integer >= 1, or None to count the modules"),
    ({"chunks": True}, "chunks is True, must be an integer >= 1, or None to count the modules"),
    ({"chunks": 2}, "chunks is 2, but modules have 1 a stage: must be the same, or None to count the modules"),
    ({"placement": None}, "placement is None, must be one of: looped, v"),
    ({"split": None}, "split is None, must be True or False"),
    ({"hint": "zb-v", "split": True}, "schedule zb-v takes 2 chunks a stage, v placement, split backward; the graph"),
    (
        {"hint": "zb-h1"},
        "split is False, must be True for the schedule 'zb-h1', which places weight tasks: add split=T",
    ),
    ({"strict": "zb-h1", "split": False}, "split is False, must be True for the schedule 'zb-h1'"),
    ({"first_step": -1}, "first_step is -1, must be an integer >= 0"),
    ({"first_step": True}, "first_step is True, must be an integer >= 0"),
    ({"loop": "mine"}, "loop is 'mine', must be one of: own, caller"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:30])
def test_bad_options_are_refused_when_the_pipeline_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rrfp.local(stages(2), **options)
    assert message in str(caught.value)


SEVERAL: list[tuple[dict[str, Any], list[str]]] = [
    ({"hint": "best", "limit": "all"}, ["hint is 'best'", "limit is 'all'"]),
    ({"seed": 1.5, "split": 1, "loop": "mine"}, ["seed is 1.5", "split is 1", "loop is 'mine'"]),
    ({"strict": "1f1b", "hint": "bf", "heartbeat": "x"}, ["neither hint nor limit", "heartbeat is 'x'"]),
    (
        {"hints": "bf", "limits": 2, "patience": 0},
        ["unknown options 'hints' (did you mean 'hint'?), 'limits' (", "patience is 0"],
    ),
]


@pytest.mark.parametrize(("options", "messages"), SEVERAL, ids=lambda value: str(value)[:30])
def test_all_wrong_options_are_named_at_once(options: dict[str, Any], messages: list[str]) -> None:
    """On a line each."""
    bad: Any = 3
    with pytest.raises(ConfigError) as of_local:
        rrfp.local(bad, **options)
    with pytest.raises(ConfigError) as of_pipeline:
        rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), rendezvous=bad, name="a/b", **options)
    faults = ["modules is of type int"], ["name is 'a/b'", "rendezvous int has no method publish()"]
    for error, more in zip((of_local.value, of_pipeline.value), faults, strict=True):
        first, *lines = str(error).splitlines()
        assert first == f"{len(lines)} faults:"
        assert len(lines) == len(messages) + len(more)
        for message in (*messages, *more):
            assert sum(message in line for line in lines) == 1


def test_what_is_no_module_or_no_rendezvous_is_refused() -> None:
    bad: Any = 3
    with pytest.raises(ConfigError, match=r"module is of type int, must be an nn.Module, a list of them"):
        rrfp.local([bad])
    with pytest.raises(ConfigError, match="modules is empty"):
        rrfp.local([])
    whole: Any = stages(1)[0][0]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"modules is of type Linear, must be a list .*: write \[module\] for"):
        rrfp.local(whole)
    with pytest.raises(ConfigError, match=r"modules is of type int, must be a list with one module a stage$"):
        rrfp.local(bad)
    with pytest.raises(ConfigError, match=r"has no method publish\(\)"):
        rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), rendezvous=bad)
    with pytest.raises(ConfigError, match="'own' for the blocking API"):
        rrfp.local(stages(1), loop="caller").blocking()


def test_every_option_has_a_default_that_fits() -> None:
    complete({})


def test_the_types_of_options_as_arguments_are_those_of_the_options() -> None:
    assert get_type_hints(OptionArguments) == get_type_hints(Options)
