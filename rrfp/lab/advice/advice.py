"""Makes the advice on recorded steps: replays them as they ran, without each cause, and with other settings."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from rrfp.core.usage import WaitCause
from rrfp.costs.table import Matrix
from rrfp.errors import ConfigError
from rrfp.hints.registry import DEFAULT_HINT, HintSpec, check_order, create_hint, default_hint
from rrfp.lab.advice import causes
from rrfp.lab.advice.recorded import Recorded, RecordedStep, check_cores, read_recording
from rrfp.lab.advice.replays import Interval, Method, Replayer, Replays, hint_text, joined
from rrfp.lab.advice.report import DOUBTFUL, WORTH, Advice, Cause, Setting
from rrfp.lab.limit_texts import DEFAULT_LIMIT
from rrfp.lab.simulation import planned_sizes, resolve_limits
from rrfp.lab.traces.chrome_reader import TracedRun, read_run
from rrfp.lab.traces.measured_costs import WARM_UP_STEPS, is_training
from rrfp.memory.admission import Limit, bytes_of
from rrfp.trace.job_data import REPLAY, TracedJob

if TYPE_CHECKING:
    from rrfp.pipeline.local_ranks import LocalRanks

#: The most steps that are replayed, the newest.
MOST_STEPS = 10

#: What a larger limit must save beyond a smaller one.
WORTH_MEMORY = 0.01

#: Hints that are tried in the place of the job's.
HINTS = ("slot-aware-pyramid", "slot-aware", "bf", "bfw", "b-priority")

#: Limits that are tried, in N.
LIMITS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller says of the job and of the steps; None: as the trace has it."""

    hint: HintSpec | None = None
    strict: str | None = None
    limit: str | None = None
    run: str | None = None
    skip_first: int = WARM_UP_STEPS
    steps: int = MOST_STEPS

    def __post_init__(self) -> None:
        if self.limit is not None:
            Limit.resolve(self.limit, 0, 1)


class AdvisedTrace:
    """The trace of a pipeline in a folder of its own, and the advice on it where rank 0 is."""

    def __init__(self, ranks: LocalRanks) -> None:
        self._ranks = ranks
        self._folder = tempfile.TemporaryDirectory(prefix="rrfp-advise-")
        self.path = os.path.join(self._folder.name, "trace.json")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def advice(self) -> Advice | None:
        """Replay the steps, for seconds."""
        if all(topology.rank for topology in self._ranks.topologies):
            return None
        hint = self._ranks.options.hint
        # The file has the name of a hint; one of the caller's own cannot be made from its name.
        return advise_file(self.path, Wishes(hint=None if isinstance(hint, str) else hint), title="pipeline")


def advise_file(
    path: str, wishes: Wishes = Wishes(), ran: Callable[[], object] = lambda: None, title: str | None = None
) -> Advice:
    """The advice on the steps of a trace file; ``ran`` is called after each replay of a step."""
    return adviser_of(path, wishes, ran, title).advice()


def adviser_of(path: str, wishes: Wishes, ran: Callable[[], object], title: str | None = None) -> Adviser:
    name, recording, replicas = recording_of(path, wishes, title)
    return Adviser(name, recording, replicas, wishes, Replayer(recording.steps, ran))


def recording_of(path: str, wishes: Wishes, title: str | None = None) -> tuple[str, Recorded, list[TracedRun]]:
    """The name of a trace file's run, its steps, and the other runs."""
    chosen, *others = read_run(path, wishes.run)
    name = title or f"{path}: {chosen.name}"
    recording = read_recording(name, chosen, skip_first=wishes.skip_first, most=wishes.steps)
    check_cores(name, recording)
    return name, recording, others


#: A cause: its name, where it is and how much of it there is, and the steps without it.
Without = tuple[str, str, Replays]


class Adviser:
    """One recording, replayed as it ran, and the advice on it."""

    def __init__(
        self, name: str, recording: Recorded, replicas: Sequence[TracedRun], wishes: Wishes, replay: Replayer
    ) -> None:
        self.name = name
        self.recording = recording
        self._steps = recording.steps
        self._replicas = replicas
        self._replay = replay
        #: What neither the trace nor the caller says of the job.
        self._unsaid: list[str] = []
        self.job = job = self._job_of(recording.run.job, wishes)
        hint = None if job.strict is not None else wishes.hint or job.hint or default_hint(job.order)
        self.method = Method(hint, job.limit, job.strict, job.order, job.takes_offers)
        if hint is not None:
            self._check_hint(hint)
        self.base = self._as_recorded()
        self._stages = recording.costs.stages
        self._work = causes.work(self._steps)

    def _job_of(self, job: TracedJob | None, wishes: Wishes) -> TracedJob:
        if job is None:
            job = TracedJob(DEFAULT_HINT, DEFAULT_LIMIT, None)
            if wishes.hint is None and wishes.strict is None:
                self._unsaid.append(f"hint {DEFAULT_HINT}: the trace does not say how the job ran (--hint, --strict)")
            if wishes.limit is None and wishes.strict is None:
                self._unsaid.append(f"limit {DEFAULT_LIMIT}: the trace does not say which one the job had (--limit)")
        else:
            for option in ("hint", "strict", "limit"):
                wish, said = getattr(wishes, option), getattr(job, option)
                if wish is not None and str(wish) != str(said):
                    told = f"that the job had {said}" if said is not None else f"no {option}"
                    self._unsaid.append(f"{option} {wish} (--{option}), although the trace says {told}")
        if wishes.strict is not None:
            job = replace(job, hint=None, limit=None, strict=wishes.strict)
        elif wishes.hint is not None or wishes.limit is not None:
            job = replace(job, limit=wishes.limit or job.limit or DEFAULT_LIMIT, strict=None)
        return job

    def _check_hint(self, hint: HintSpec) -> None:
        try:
            create_hint(hint)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}: --hint says which one the job has") from None
        check_order(hint, self.job.order)

    @property
    def measured(self) -> Matrix:
        return np.array([step.seconds for step in self._steps])

    @property
    def title(self) -> str:
        return f"{self.recording.costs.microbatches} microbatches on {self._stages} stages, {self.method}"

    def _as_recorded(self) -> Replays:
        if self.job.strict == REPLAY:
            return self._in_recorded_order()
        return self._replay(self.method)

    def _in_recorded_order(self) -> Replays:
        executed = self.recording.executed
        return self._replay.each([replace(self.method, hint=None, strict=order) for order in executed], self._steps)

    def advice(self) -> Advice:
        measured, base = self.measured, self.base.seconds
        named = () if self.job.strict == REPLAY else self._causes()
        found = [Cause(name, text, float(left.seconds.mean()), left.saved(base)) for name, text, left in named]
        settings = [] if self.job.strict == REPLAY else self._settings()
        return Advice(
            self.name,
            tuple(trace.step for trace in self.recording.traces),
            self.recording.left_out,
            self.title,
            float(measured.mean()),
            float(base.mean()),
            self.base.held,
            tuple(sorted(found, key=lambda cause: -cause.share.value)),
            tuple(sorted(settings, key=lambda setting: -setting.saved.value)),
            (*self.assumed(), *self._assumed_of_settings()),
            self.doubt(),
        )

    # Causes.

    def _causes(self) -> Iterator[Without]:
        if self._stages > 1 and self._work.all():
            yield from self._of_work()
        yield from self._of_messages()
        yield from self._of_times()
        yield from self._of_waits()

    def _of_work(self) -> Iterator[Without]:
        even = causes.with_work(self._steps, np.full_like(self._work, self._work.mean()))
        yield "stage imbalance", self._imbalance(), self._replay(self.method, even)
        slow = _most(self._work)
        where, faster = self._counterpart(slow)
        if self._work[slow] > faster:
            wanted = self._work.copy()
            wanted[slow] = faster
            yield "slowest stage", where, self._replay(self.method, causes.with_work(self._steps, wanted))

    def _imbalance(self) -> str:
        slow = _most(self._work)
        return f"stage {slow} computes {self._work[slow] / self._work.mean() - 1:.0%} more than the mean stage"

    def _counterpart(self, slow: int) -> tuple[str, float]:
        """How a stage compares with itself on other replicas, or with the other stages."""
        times = [seconds for run in self._replicas if (seconds := _stage_seconds(run, slow)) is not None]
        if times:
            own, middle = self._work[slow], float(np.median(times))
            return f"stage {slow} takes {own / middle - 1:+.0%} beside the same stage of other replicas", middle
        others = float(np.delete(self._work, slow).mean())
        more = f"{self._work[slow] / others - 1:.0%} more than the mean of the others"
        return f"stage {slow} takes {more}: a heavier part of the model, or a slower rank", others

    def _of_messages(self) -> Iterator[Without]:
        means, steps = causes.links(self._steps), self._steps
        if not means:
            return
        for link, middle in causes.slow_links(means).items():
            text = f"a message takes {_ms(means[link])}, on the middle one of the other links {_ms(middle)}"
            faster = causes.with_messages(steps, {link: middle / means[link]})
            yield f"link {link[0]} - {link[1]}", text, self._replay(self.method, faster)
        none = causes.with_messages(steps, dict.fromkeys(means, 0.0))
        mean = float(np.mean([*means.values()]))
        yield "all messages", f"{_ms(mean)} each in the mean", self._replay(self.method, none)

    def _of_times(self) -> Iterator[Without]:
        factors = causes.factors_of(self._steps)
        sizes = np.concatenate(factors.sizes, axis=1)
        text = f"tasks of a stage take {sizes.min():.2f} to {sizes.max():.2f} times the middle one by their microbatch"
        yield "spread of microbatch sizes", text, self._replay(self.method, causes.without_sizes(self._steps, factors))
        part = float(np.log(np.concatenate(factors.jitter, axis=1)).std())
        text = f"tasks differ by {part:.0%} beside that; messages of a link differ"
        yield "jitter", text, self._replay(self.method, causes.without_jitter(self._steps, factors))

    def _of_waits(self) -> Iterator[Without]:
        method, steps = self.method, self._steps
        if method.hint is not None and method.limit is not None:
            yield "memory limit", self._waited_for_memory(), self._replay(replace(method, limit=None))
        gaps = np.concatenate([rows.ravel() for step in steps for rows in step.dispatch.values()])
        text = f"a task begins {_ms(float(np.mean(gaps)))} after it could, in the mean"
        yield "dispatch", text, self._replay(method, causes.without_gaps(steps, "dispatch"))
        waited = self.recording.waited(WaitCause.ORDER)
        if self.job.members > 1 or max(waited) > 0:
            text = f"stage {_most(waited)} waited for its group's order {max(waited):.1%} of the step"
            yield "coordination of groups", text, self._replay(method, causes.without_gaps(steps, "order"))
        ends = float(np.mean([max(step.opening.values()) + step.closing for step in steps]))
        text = f"ranks that call late, and what follows the last task: {_ms(ends)}"
        yield "start and end of the step", text, self._replay(method, causes.without_ends(steps))

    def _waited_for_memory(self) -> str:
        waited = self.recording.waited(WaitCause.MEMORY)
        return f"stage {_most(waited)} waited for memory {max(waited):.0%} of the step"

    # Settings.

    def _settings(self) -> list[Setting]:
        ways = (self._limits, self._orders, self._sizes, self._split, self._microbatches, self._cut, self._coordination)
        tried = [setting for way in ways for setting in way()]
        return [setting for setting in tried if setting.saved.low > 0 and setting.saved.value >= WORTH]

    def _setting(
        self,
        cause: str,
        reason: str,
        setting: str,
        replays: Replays,
        *,
        is_bound: bool = False,
        shows_held: bool = False,
    ) -> Setting:
        saved, seconds = replays.saved(self.base.seconds), float(replays.seconds.mean())
        if shows_held:
            setting += f" (holds {replays.held}, now {self.base.held})"
        return Setting(cause, reason, setting, seconds, saved, replays.held, is_bound)

    def _limits(self) -> Iterator[Setting]:
        method = self.method
        if method.hint is None or method.limit is None:
            return
        found = []
        for limit in self._larger(method.limit):
            text, replays = f"limit={_quoted(limit)}", self._replay(replace(method, limit=limit))
            found.append(self._setting("memory limit", self._waited_for_memory(), text, replays, shows_held=True))
        yield from _rising(sorted(found, key=lambda setting: setting.held))

    def _larger(self, limit: Limit | int | str) -> list[str | int]:
        stages, microbatches = self._stages, self.recording.costs.microbatches
        num_bytes = limit.bytes if isinstance(limit, Limit) else bytes_of(limit)
        if num_bytes is not None:
            return [f"{num_bytes * halves // 2}B" for halves in (3, 4, 6)]
        least = min(each.microbatches or microbatches for each in resolve_limits(self.recording.costs, limit))
        names = {1: "n", 2: "2n"}
        # One that takes all microbatches of the step is the last that differs.
        larger = [n for n in LIMITS if n * stages > least and (n - 1) * stages < microbatches]
        auto = ["auto"] if limit != "auto" and max(map(self.recording.costs.chunks_of, range(stages))) == 1 else []
        return [*auto, *(names.get(n, n * stages) for n in larger)]

    def _orders(self) -> Iterator[Setting]:
        method = self.method
        if method.hint is None:
            has_chunks = max(map(self.recording.costs.chunks_of, range(self._stages))) > 1
            reason, found = f"the order is fixed ({method.strict})", []
            for limit in ("n", "2n") if has_chunks else ("1f1b", "n", "2n"):
                replays = self._replay(replace(method, hint=DEFAULT_HINT, strict=None, limit=limit))
                text = f'hint="{DEFAULT_HINT}", limit="{limit}"'
                found.append(self._setting("fixed order", reason, text, replays, shows_held=True))
            yield from _rising(found)
            return
        others = [hint for hint in HINTS if hint != method.hint and self._fits(hint)]
        tried = [(hint, self._replay(replace(method, hint=hint))) for hint in others]
        hint, best = min(tried, key=lambda pair: pair[1].seconds.sum())
        yield self._setting("order of tasks", f"{hint_text(method.hint)} orders tasks", f'hint="{hint}"', best)

    def _fits(self, hint: str) -> bool:
        try:
            check_order(hint, self.job.order)
        except ConfigError:
            return False
        return hint != "bfw" or self.recording.costs.split

    def _sizes(self) -> Iterator[Setting]:
        steps, method = self._steps, self.method
        if method.hint is not None and self.job.order == "free" and any(step.costs.sizes is None for step in steps):
            sized = [replace(s, costs=replace(s.costs, sizes=tuple(planned_sizes(s.costs)))) for s in steps]
            reason, replays = "the job passes no sizes of microbatches", self._replay(method, sized)
            yield self._setting("spread of microbatch sizes", reason, "step(sizes=...)", replays, is_bound=True)

    def _split(self) -> Iterator[Setting]:
        """Between the least and the most that weight gradients may take."""
        if self.method.hint is None or self.recording.costs.split:
            return
        found = []
        for part in causes.WEIGHT_PARTS:
            replays = self._replay(self.method, causes.split_backward(self._steps, part))
            found.append(self._setting("whole backward", "backward runs as a whole", "split=True", replays))
        low, high = sorted(found, key=lambda setting: setting.saved.value)
        saved = Interval((low.saved.value + high.saved.value) / 2, low.saved.low, high.saved.high)
        yield replace(low, seconds=(low.seconds + high.seconds) / 2, saved=saved)

    def _microbatches(self) -> Iterator[Setting]:
        steps, count = self._steps, 2 * self.recording.costs.microbatches
        twice = self._replay(self.method, [joined(*pair) for pair in zip(steps, (*steps[1:], steps[0]), strict=True)])
        idle = self.recording.waited(WaitCause.DRAINED)
        reason = f"stage {_most(idle)} had nothing left to do {max(idle):.0%} of the step"
        text = f"{count} microbatches a step, twice as many, by the time of each,"
        yield self._setting("fill and drain", reason, text, replace(twice, seconds=twice.seconds / 2))

    def _cut(self) -> Iterator[Setting]:
        if self._stages > 1 and self._work.all():
            even = causes.with_work(self._steps, np.full_like(self._work, self._work.mean()))
            replays = self._replay(self.method, even)
            text = 'a cut by layer times, of rrfp.split(cuts="times") or rrfp plan,'
            yield self._setting("stage imbalance", self._imbalance(), text, replays, is_bound=True)

    def _coordination(self) -> Iterator[Setting]:
        if self.job.members > 1 and self.job.coordination == "agreement":
            replays = self._replay(self.method, causes.without_gaps(self._steps, "order"))
            reason, text = "the ranks of a group agree by proposing", 'coordination="leader"'
            yield self._setting("coordination of groups", reason, text, replays, is_bound=True)

    # What the figures rest on.

    def assumed(self) -> Iterator[str]:
        """What the trace does not say, and every replay takes for given."""
        yield from self._unsaid
        recording = self.recording
        if recording.filled:
            yield f"{recording.filled} of {recording.messages} messages, whose time is not recorded: as the others"
        if recording.run.clock_error:
            yield f"clocks of hosts, which are known to {_ms(recording.run.clock_error)}"
        if recording.core_wait() is None:
            yield "a core for every task: the trace does not say how long threads waited for one"
        yield "recomputation, where there is any: as recorded, a part of backward"

    def _assumed_of_settings(self) -> Iterator[str]:
        costs, method = self.recording.costs, self.method
        if method.hint is not None and not costs.split:
            yield "split=True: weight gradients take a third to a half of backward; a split trace has their times"
        if method.hint is not None and any(step.costs.sizes is None for step in self._steps):
            yield "step(sizes=...): sizes that follow the recorded times exactly"

    def doubt(self) -> str:
        """Why the prediction for the steps as they ran is off by more than 5%; empty where it is not."""
        measured = self.measured

        def off(replays: Replays) -> float:
            return abs(float(replays.seconds.sum() / measured.sum()) - 1)

        if off(self.base) <= DOUBTFUL:
            return ""
        recording, in_order = self.recording, self._in_recorded_order()
        if off(in_order) <= DOUBTFUL:
            right = f"in the recorded order of tasks it is off by {off(in_order):.1%}"
            return f"{right}, so the job did not choose tasks as {self.method} does"
        if recording.filled > DOUBTFUL * recording.messages:
            return f"the times of {recording.filled} of {recording.messages} messages are not recorded"
        slowest = max(causes.links(self._steps).values(), default=0.0)
        if recording.run.clock_error > slowest / 2 > 0:
            return f"clocks of hosts are known to {_ms(recording.run.clock_error)}, and messages take {_ms(slowest)}"
        late = [float(np.mean([_late(step, stage) for step in self._steps])) for stage in range(self._stages)]
        return (
            f"tasks of stage {_most(late)} began {_ms(max(late))} a step after they could, and those behind waits for "
            "memory are taken to be as late as the others"
        )


def _rising(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Of settings that take ever more memory, those that gain by it."""
    best = -np.inf
    for setting in settings:
        if setting.saved.value >= best + WORTH_MEMORY:
            best = setting.saved.value
            yield setting


def _late(step: RecordedStep, stage: int) -> float:
    own = [*step.costs.virtual_stages_of(stage)]
    return float(sum(rows[own].sum() for rows in step.dispatch.values()))


def _stage_seconds(run: TracedRun, stage: int) -> float | None:
    """Compute of a stage in the mean training step behind the first ones; None without one."""
    traces = [trace for trace in run.steps if is_training(trace)][WARM_UP_STEPS:]
    seconds = [sum(span.end - span.start for span in trace.tasks if span.stage == stage) for trace in traces]
    return float(np.mean(seconds)) if seconds and min(seconds) > 0 else None


def _most(values: Sequence[float] | Matrix) -> int:
    return int(np.argmax(values))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def _quoted(limit: str | int) -> str:
    return f'"{limit}"' if isinstance(limit, str) else str(limit)
