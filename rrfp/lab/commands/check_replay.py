"""`rrfp check replay`: the event log of a failed rank, fed to a core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import RrfpError

if TYPE_CHECKING:
    from rrfp.core.stage_core import StageCore
    from rrfp.trace.event_log import EventLog

_LOG = "A file that a pipeline with event_log=FOLDER wrote: FOLDER/events-rankR.jsonl."
_TASK = "Print what happened to this task in the newest step, and what it waits for."


def replay(
    log: Annotated[str, typer.Argument(metavar="LOG", help=_LOG)],
    task: Annotated[str | None, typer.Option(metavar="F1@2", help=_TASK)] = None,
    json: Json = False,
) -> None:
    """Feed a rank's event log to a core, and print what it waits for; exit code 1 if it is in another state."""
    import json as json_module

    from rrfp.core.waiting import state_of, tell
    from rrfp.model.tasks import Task
    from rrfp.trace.event_log import read_event_log

    read = read_event_log(log)
    core, refused = read.recording.replay()
    story = None if task is None else tell(core, read.topology, Task.parse(task))
    state = json_module.loads(json_module.dumps(state_of(core)))  # tuples and lists alike
    different = [name for name in {**read.state, **state} if read.state.get(name) != state.get(name)]
    refusals = [f"event {each.number} ({each.event}): {each.error}" for each in refused]
    if json:
        answer = {"rank": read.topology.rank, "why": read.why, "state": state}
        told = {} if story is None else {"story": story}
        print_json({**answer, "refused": refusals, "different": different, **told})
    else:
        for line in (*_described(read, core), *(f"refused {refusal}" for refusal in refusals)):
            typer.echo(line)
        for line in [] if story is None else [f"story of {task}:", *(f"  {each}" for each in story)]:
            typer.echo(line)
    if different:
        name = different[0]
        raise RrfpError(f"{name} is {state.get(name)} after the replay, was {read.state.get(name)} when recorded")
    if not json:
        typer.echo("the core is in the recorded state")


def _described(log: EventLog, core: StageCore) -> list[str]:
    from rrfp.core.waiting import describe, wait_line

    recording, step = log.recording, core.step
    first = f" from step {recording.steps[0].known.step} on" if recording.steps else ""
    name = log.topology.name
    lines = [f"{name}: {len(recording.events)} events{first}", f"why: {log.why}"]
    if step is None:
        return [*lines, "no step had begun"]
    running = ", ".join(map(core.graph.text_of, core.in_flight)) or "nothing"
    ready = ", ".join(map(core.graph.text_of, core.ready)) or "nothing"
    lines.append(f"in {step.id}: {step.num_enqueued} of {step.num_tasks} tasks begun, D {core.holding.held}")
    lines.append(f"running: {running}; ready: {ready}")
    return [*lines, wait_line(name, describe(core, log.topology))]
