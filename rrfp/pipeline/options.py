"""The options of a pipeline: each stands once, with its type, default and allowed values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import torch

from rrfp import timeouts
from rrfp.callbacks.base import Callback
from rrfp.compute.lanes.base import Lane
from rrfp.compute.lanes.thread import LOWEST_NICE
from rrfp.compute.loss import Reduction
from rrfp.compute.split.backward import Unsplittable
from rrfp.core.ready_set import MicrobatchOrder
from rrfp.devices.base import Device
from rrfp.errors import ConfigError, Faults, misspelt, nearest_to
from rrfp.hints.registry import HintSpec, check_order, check_shared, create_hint, create_strict
from rrfp.memory.admission import Limit
from rrfp.model.placement import Layout
from rrfp.plain import is_path, shown
from rrfp.runtime.context import Coordination
from rrfp.runtime.steps.plan import StepArguments
from rrfp.transports.base import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_QUEUE_BYTES
from rrfp.transports.registry import TRANSPORTS, TransportSpec, allowed_transports

#: Makes the lane of a stage.
LaneFactory = Callable[[int], Lane]

DataSecurity = Literal["encrypted", "plain"]

#: Whether replicas run microbatches of one another, and how they share them out.
Sharing = Literal[False, True, "dealt"]

#: What the other ranks do where one is lost.
OnLostRank = Literal["abort", "finish"]


@dataclass(frozen=True, slots=True)
class Option:
    """The allowed values of an option, and its default."""

    #: The allowed values, for the error; a function where plugins add values.
    wanted: str | Callable[[], str] = ""
    #: Whether a value is allowed; may raise a `ConfigError` of its own.
    fits: Callable[[Any], bool] = lambda value: True
    #: Whether it must be the same on all ranks of a pipeline.
    is_common: bool = False
    #: Its value where the caller passes none.
    default: Any = None

    def common(self) -> Option:
        """The same option, with one value for all ranks."""
        return replace(self, is_common=True)

    def check(self, name: str, value: Any) -> None:
        if type(value) is int and not -(2**63) <= value < 2**64:  # ranks exchange it
            raise ConfigError(f"{name} is {shown(value)}, must be an integer of 64 bits")
        if not self.fits(value):
            wanted = self.wanted() if callable(self.wanted) else self.wanted
            raise ConfigError(f"{name} is {value!r}, must be {wanted}")


def _one_of(choices: Any) -> Option:
    names = get_args(choices)
    return Option(f"one of: {', '.join(names)}", names.__contains__)


def _flag() -> Option:
    return Option("True or False", lambda value: type(value) is bool)


def _seconds() -> Option:
    def fits(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

    return Option("a finite number above 0", fits)


def _integer(least: int) -> Option:
    return Option(f"an integer >= {least}", lambda value: type(value) is int and value >= least)


def _or_none(option: Option, meaning: str) -> Option:
    return Option(f"{option.wanted}, or None {meaning}", lambda value: value is None or option.fits(value))


def _function(call: str) -> Option:
    return Option(f"callable: {call}", lambda value: value is None or callable(value))


def _is_loss(value: Any) -> bool:
    losses = value.values() if isinstance(value, Mapping) else [value]
    return value is None or all(map(callable, losses))


def _is_folder(value: Any) -> bool:
    return value is None or (isinstance(value, str | os.PathLike) and is_path(value))


def _are_callbacks(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Callback) for each in value)


def _is_device(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", value) is not None  # torch has 0..127
    return value is None or isinstance(value, Device | torch.device)


def _is_seed(value: Any) -> bool:
    return value is None or type(value) is int


def _is_nice(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LOWEST_NICE


def _is_sharing(value: Any) -> bool:
    return value is False or value is True or value == "dealt"


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == value.encode(errors="ignore").decode())


def _is_placement(value: Any) -> bool:
    if isinstance(value, str):
        return value in get_args(Layout)
    return isinstance(value, list | tuple) and bool(value) and all(type(stage) is int for stage in value)


def _is_transport(value: Any) -> bool:
    if isinstance(value, str) and value not in TRANSPORTS:
        raise ConfigError(f"transport is {misspelt(value, TRANSPORTS.names())}, must be {allowed_transports()}")
    return callable(value) or value in TRANSPORTS


def _resolved(resolve: Callable[[Any], object]) -> Option:
    """An option that is None by default; ``resolve`` raises for a value that does not fit."""
    return Option(fits=lambda value: value is None or resolve(value) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The keyword options of `rrfp.Pipeline` and `rrfp.local`."""

    transport: Annotated[TransportSpec, Option(allowed_transports, _is_transport).common()] = "auto"
    """A transport's name, class or factory."""

    hint: Annotated[HintSpec | None, _resolved(create_hint).common()] = None
    """A hint's name, class or instance; by default, unless ``strict`` is set, ``slot-aware-pyramid``, or ``slot-aware``
    with ``order="natural"``."""

    strict: Annotated[str | None, _resolved(create_strict).common()] = None
    """The name of a schedule to run strictly: the fixed-order baseline. Excludes ``hint`` and ``limit``."""

    replay: Annotated[str | os.PathLike[str] | None, Option("a folder, or None", _is_folder)] = None
    """A folder that a pipeline with ``event_log`` and the same layout wrote: training steps run in the executed order
    of the newest one in it that all ranks have run whole, for the same bits without ``deterministic=True``. Excludes
    ``hint``, ``strict`` and ``limit``."""

    limit: Annotated[
        Limit | int | str | None,
        _resolved(partial(Limit.resolve, stage=0, stages=1, others=", or an rrfp.Limit")).common(),
    ] = None
    """Microbatches that a stage may hold: a number, ``"1f1b"``, ``"n"``, ``"2n"`` (the default), or ``"auto"``, which
    follows slow links from step to step; bytes, such as ``"8GB"`` (B, kB, MB, GB: powers of 1000); or both, as an
    `rrfp.Limit`."""

    order: Annotated[MicrobatchOrder, _one_of(MicrobatchOrder).common()] = "free"
    """In which order the microbatches of one kind of task run on one virtual stage: ``"free"``, as they are ready and
    as the hint ranks them, or ``"natural"``, always 0, 1, 2, ... Kinds and chunks alternate freely in both. With
    ``"natural"`` the ``sizes`` of a step reorder nothing, and a hint that orders microbatches, such as a pyramid, is
    refused."""

    loss_fn: Annotated[
        Callable[[Any, Any], Any] | Mapping[str, Callable[[Any, Any], Any]] | None,
        Option("callable: loss_fn(output, target), or for several losses a dict {part: function}", _is_loss),
    ] = None
    """``loss_fn(output, target)``, the mean over a microbatch. If it is a module, its parameters belong to the last
    virtual stage; the other ranks do not use theirs. Where no part of the graph reads several of its parts, a dict with
    a loss for each of these; a microbatch's loss is the sum."""

    reduction: Annotated[Reduction, _one_of(Reduction).common()] = "mean"
    """How microbatches' losses combine: ``"mean"`` (weighted) or ``"sum"``."""

    seed: Annotated[
        int | None,
        Option("an integer of 64 bits, or None for torch's", _is_seed).common(),
    ] = 0
    """Seed of the random numbers of each task, such as those of dropout; the same on all ranks. They do not follow
    ``torch.manual_seed``, unless this is None: then it is ``torch.initial_seed()`` when the pipeline is made."""

    first_step: Annotated[int, _integer(least=0).common()] = 0
    """The number of the first training step, for a run that resumes. Random numbers depend on the number of the
    training step, and never on evaluations between."""

    stall_after: Annotated[float, _seconds()] = timeouts.STALL_AFTER_S
    """Seconds of idleness in a step after which all ranks are asked for the reason."""

    abort_after: Annotated[float | None, _or_none(_seconds(), "for never")] = None
    """Seconds after which a task that has not completed, or a rank whose event loop does not run, ends the job; None
    (the default): never. Set it to several times the duration of the slowest task."""

    lock_watch: Annotated[bool, _flag()] = True
    """Whether each process of a job starts a second, small one, which prints its Python stacks while a call into C
    keeps the interpreter's lock (Linux). `rrfp.local` starts none by default."""

    connect_timeout: Annotated[float, _seconds()] = timeouts.CONNECT_S
    """Seconds to wait for the peers at the start."""

    heartbeat: Annotated[float, _seconds()] = timeouts.HEARTBEAT_S
    """Seconds of silence after which a peer is sent a heartbeat."""

    patience: Annotated[float, _seconds()] = timeouts.PATIENCE_S
    """Seconds for which a connected peer may be silent, stopped by a debugger or a migration, before it is lost; at
    least three heartbeats. A process that has ended is noticed at once."""

    queue_bytes: Annotated[int, _integer(least=1)] = DEFAULT_QUEUE_BYTES
    """The most bytes queued for one peer and channel before a send waits."""

    max_message_bytes: Annotated[int, _integer(least=1)] = DEFAULT_MAX_MESSAGE_BYTES
    """Larger messages are refused before anything is allocated."""

    allow_insecure: Annotated[bool, _flag()] = False
    """Permit tcp connections without authentication and encryption, which a job without a secret needs."""

    data: Annotated[DataSecurity, _one_of(DataSecurity).common()] = "encrypted"
    """How tensors travel over tcp in a job with a secret: ``"encrypted"``, or ``"plain"``, which is faster. Control
    messages are always encrypted."""

    trace_steps: Annotated[int, _integer(least=0).common()] = 16
    """How many of the newest training steps' traces each rank keeps for `save_trace`; 0 keeps none. With more than
    65,536 spans (tasks, waits, messages) in all of them, about 10 MB, it keeps fewer."""

    event_log: Annotated[str | os.PathLike[str] | None, Option("a folder, or None", _is_folder)] = None
    """A folder: when the pipeline stalls or aborts, or else when it is left, each rank writes the events of its core in
    the current and the last step to ``events-rankR.jsonl`` there, for ``replay`` and ``rrfp check replay``. No tensors
    are in it."""

    callbacks: Annotated[Sequence[Callback], Option("a list of rrfp.callbacks.Callback", _are_callbacks)] = ()
    """Objects that are notified of steps, stalls and aborts, on a thread of their own; see `rrfp.callbacks.Callback`.
    Each process has its own."""

    lane_nice: Annotated[int, Option(f"0..{LOWEST_NICE}", _is_nice)] = 0
    """Niceness of the compute thread (Linux); a positive value lets messages overtake compute on busy cores."""

    lane: Annotated[LaneFactory | None, _function("lane(stage)")] = None
    """Makes the lane of a stage, such as a `TimerLane` for virtual time; a compute thread by default."""

    device: Annotated[
        Device | torch.device | str | None,
        Option(
            "'cpu', 'cuda', 'cuda:<index>', a torch.device, a Device, or None for that of the modules",
            _is_device,
        ),
    ] = None
    """Where tasks run; by default where the parameters and buffers of the rank's modules are. It moves nothing. Ranks
    may have different devices, and several stages of a process the same one, each with a stream of its own."""

    placement: Annotated[
        Layout | Sequence[int],
        Option("one of: looped, v; or a list with the stage of each virtual stage", _is_placement).common(),
    ] = "looped"
    """Which virtual stages a stage holds: ``"looped"`` or ``"v"``; or the stage of each virtual stage in a list, such
    as ``[0, 0, 1, 1, 0]``, where stages may have different numbers of chunks."""

    chunks: Annotated[int | None, _or_none(_integer(least=1), "to count the modules")] = None
    """Model chunks (virtual stages) of a rank; torch.distributed.pipelining calls microbatches chunks. Needed only for
    a `StageProgram`; otherwise the modules are counted."""

    partition: Annotated[str | None, Option("a text or None", _is_text).common()] = None
    """Describes the whole model and where it is cut: ranks that cut it differently are refused at the start. The stages
    of `rrfp.split` pass theirs."""

    split: Annotated[bool, _flag().common()] = False
    """Whether backward is split into input gradients (B) and weight gradients (W). No hint turns it on: without weight
    tasks, the other rules of a hint that orders them apply. A schedule that places weight tasks needs it."""

    unsplittable: Annotated[Unsplittable, _one_of(Unsplittable).common()] = "whole"
    """For a module that differentiates only as a whole, with ``split``: ``"whole"``, B runs all of backward, or
    ``"refuse"``; see `TorchStage`."""

    deterministic: Annotated[bool, _flag().common()] = False
    """Whether gradients are added in microbatch order and buffers written in order, so that a step's result is bitwise
    the same whatever the timing, and equal to `rrfp.testing.reference`'s. The sums of replicas are added in the order
    of replicas."""

    check_replicas: Annotated[int | None, _or_none(_integer(least=0), "for never").common()] = 100
    """In each so many training steps that sum gradients, replicas compare a checksum of each parameter that learns, and
    stages those of the copies of a tie, so that one which an optimizer changed on some of them only ends the run with
    its name. 0 or None: never; before the first sum all are compared in any case."""

    share_replicas: Annotated[Sharing, Option("False, True or 'dealt'", _is_sharing).common()] = False
    """``"dealt"``: from the fourth training step on, replicas run as many microbatches each as keeps the step short, by
    the durations that they measured in the last steps, whichever replica's caller has them. So a slow rank does not
    slow the replicas without it. True: each rank claims the forwards that it runs from all replicas, while the step
    runs; so a stage's ranks share its work, though several are slow, or one has just become so. Losses, weights and
    random numbers stay those of the caller's microbatches; see docs/how-to/slow-replica.md."""

    on_lost_rank: Annotated[OnLostRank, _one_of(OnLostRank).common()] = "abort"
    """``"finish"``: where a rank's process ends or falls silent in a training step, whole replicas compute the lost
    microbatches too, so that the step is complete; then save a checkpoint and end, see `StepResult.lost` and
    docs/how-to/lost-rank.md. ``"abort"``: every rank raises `PipelineAborted`."""

    coordination: Annotated[Coordination, _one_of(Coordination).common()] = "leader"
    """How the ranks of a group (tensor parallelism) agree on an order: ``"leader"``, or ``"agreement"``, the paper's
    all-gather with retries."""

    depth: Annotated[int | None, _or_none(_integer(least=1), "for the lane's")] = None
    """The most tasks that a rank has enqueued and not completed; by default 1 on a CPU, 2 on a device, which then need
    not wait for the event loop, and 2 where a group has a leader, so that its decisions travel while the task before
    runs. It is never changed. A limit on bytes lets no forward start behind one whose size is not known yet."""


class OptionArguments(TypedDict, total=False):
    """`Options` as keyword arguments, for type checkers."""

    transport: TransportSpec
    hint: HintSpec | None
    strict: str | None
    replay: str | os.PathLike[str] | None
    limit: Limit | int | str | None
    order: MicrobatchOrder
    loss_fn: Callable[[Any, Any], Any] | Mapping[str, Callable[[Any, Any], Any]] | None
    reduction: Reduction
    seed: int | None
    first_step: int
    stall_after: float
    abort_after: float | None
    lock_watch: bool
    connect_timeout: float
    heartbeat: float
    patience: float
    queue_bytes: int
    max_message_bytes: int
    allow_insecure: bool
    data: DataSecurity
    trace_steps: int
    event_log: str | os.PathLike[str] | None
    callbacks: Sequence[Callback]
    lane_nice: int
    lane: LaneFactory | None
    device: Device | torch.device | str | None
    placement: Layout | Sequence[int]
    chunks: int | None
    partition: str | None
    split: bool
    unsplittable: Unsplittable
    deterministic: bool
    check_replicas: int | None
    share_replicas: Sharing
    on_lost_rank: OnLostRank
    coordination: Coordination
    depth: int | None


@cache
def option_table() -> Mapping[str, Option]:
    hints = get_type_hints(Options, include_extras=True)
    rules = {name: next(part for part in get_args(hint) if isinstance(part, Option)) for name, hint in hints.items()}
    return {each.name: replace(rules[each.name], default=each.default) for each in fields(Options)}


def common_options() -> list[str]:
    """The names of the options that must be the same on all ranks."""
    return [name for name, option in option_table().items() if option.is_common]


def complete(passed: OptionArguments, arguments: str = "") -> Options:
    """The options of a caller who passed these, with torch's seed in place of None.

    Unknown names, values that do not fit, and options that exclude each other are one ConfigError that names all of
    them and the allowed values; ``arguments`` are the names of keyword arguments that are not options, for that.
    """
    table = option_table()
    with Faults() as faults:
        with faults.kept():
            _check_names(passed, arguments)
        known: Any = {name: value for name, value in passed.items() if name in table}
        options = Options(**known)
        for name, option in table.items():
            with faults.kept():
                option.check(name, getattr(options, name))
        with faults.kept():
            _check_patience(options)
        if options.strict is not None and (options.hint is not None or options.limit is not None):
            faults.keep("strict runs a schedule to the letter: it goes with neither hint nor limit")
        others = [name for name in ("hint", "strict", "limit") if getattr(options, name) is not None]
        if options.replay is not None and others:
            faults.keep(f"replay runs a logged step to the letter: it goes without {' and '.join(others)}")
    _check_order(options)
    _check_sharing(options)
    _check_finishing(options)
    return replace(options, seed=torch.initial_seed()) if options.seed is None else options


def seed_of(options: Options) -> int:
    assert options.seed is not None  # `complete` has put torch's in its place
    return options.seed


def _check_names(passed: OptionArguments, arguments: str) -> None:
    table = option_table()
    unknown = [name for name in passed if name not in table]
    if not unknown:
        return
    known = [*table, *filter(None, arguments.split(", "))]
    # Torch's schedules take n_microbatches when they are made.
    of_step = [name for name in unknown if name.removeprefix("n_") in StepArguments.__annotations__]
    texts = ", ".join(
        f"{name!r} (write step(..., {name.removeprefix('n_')}=...))" if name in of_step else misspelt(name, known)
        for name in unknown
    )
    if all(name in of_step or nearest_to(name, known) for name in unknown):
        rest = ": docs/reference/options.md has all"
    else:
        rest = f", must be one of: {', '.join(table)}" + (f"; or an argument: {arguments}" if arguments else "")
    raise ConfigError(f"unknown {'option' if len(unknown) == 1 else 'options'} {texts}{rest}")


def _check_order(options: Options) -> None:
    if options.order != "natural":
        return
    if options.strict is not None or options.replay is not None:
        what = "replay" if options.strict is None else "strict"
        raise ConfigError(f"order is 'natural', must be 'free' with {what}: a schedule is the order of all tasks")
    if options.hint is not None:
        check_order(options.hint, options.order)


def _check_sharing(options: Options) -> None:
    if not options.share_replicas:
        return
    if options.deterministic:
        raise ConfigError("deterministic is True, must be False with share_replicas: durations decide who runs what")
    if options.replay is not None:
        raise ConfigError("replay is set, must be None with share_replicas: a logged step has other microbatches")
    if options.share_replicas is True and options.order == "natural":
        raise ConfigError("order is 'natural', must be 'free' with share_replicas=True: any idle copy takes the next")
    if options.hint is not None:
        check_shared(options.hint, by_claims=options.share_replicas is True)


def _check_finishing(options: Options) -> None:
    if options.on_lost_rank != "finish":
        return
    if options.deterministic:
        raise ConfigError("deterministic is True, must be False with on_lost_rank='finish': others add the gradients")
    if options.replay is not None:
        raise ConfigError("replay is set, must be None with on_lost_rank='finish': it has other microbatches")


def _check_patience(options: Options) -> None:
    patience, heartbeat, table = options.patience, options.heartbeat, option_table()
    fit = table["patience"].fits(patience) and table["heartbeat"].fits(heartbeat)
    if fit and patience < 3 * heartbeat:
        least = f"at least three times heartbeat, which is {heartbeat:g}"
        raise ConfigError(f"patience is {patience:g}, must be {least}")
