"""Mutants that every change to the tests must go on killing: each breaks one promise that nothing else would notice.

A guard is what must fail: tests, or a campaign of the command line, always the same, so that no timing decides.
"""

from __future__ import annotations

from dataclasses import dataclass

#: ``("pytest", tests...)`` or ``("rrfp", words...)``.
Guard = tuple[str, ...]

CAMPAIGN: Guard = ("rrfp", "check", "faults", "--runs", "600", "--seed", "777")
ADMISSION: Guard = ("rrfp", "check", "admission", "--stages", "1,2", "--microbatches", "2,3")


def tests(*names: str) -> Guard:
    """These tests, by their paths below tests/."""
    return ("pytest", *(f"tests/{name}" for name in names))


@dataclass(frozen=True, slots=True)
class Named:
    """One mutant.

    Attributes:
        name: what is broken.
        file: where, as a path inside the tree.
        old: the text that goes; it must be there exactly once.
        new: the text that comes.
        guards: each of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    guards: tuple[Guard, ...]

    def applied(self, source: str) -> str:
        """``source`` with the mutant in it.

        Raises:
            ValueError: if the text is not there exactly once: the code has changed, and this entry must follow.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name!r}: {self.file} has its text {count} times, must have it once: {self.old}"
            )
        return source.replace(self.old, self.new)


NAMED: tuple[Named, ...] = (
    Named(
        "staircase dropped",
        "rrfp/memory/rules.py",
        "return self._chunks - 1 - chunk",
        "return 0",
        (ADMISSION, CAMPAIGN, tests("core/test_admission.py")),
    ),
    Named(
        "K off by one",
        "rrfp/memory/admission.py",
        "return None if self.microbatches is None else self.microbatches * chunks",
        "return None if self.microbatches is None else (self.microbatches + 1) * chunks",
        (ADMISSION, CAMPAIGN, tests("core/test_admission.py")),
    ),
    Named(
        "reserve rule dropped",
        "rrfp/memory/rules.py",
        'return "reserve" if context.is_forced else cls.name',
        "return cls.name",
        (ADMISSION, CAMPAIGN, tests("core/test_admission.py")),
    ),
    Named(
        "one Send dropped",
        "rrfp/core/step.py",
        "[ev.Send(task, peer, consumed_of.get(peer, 0)) for peer in wiring.peers]",
        "[ev.Send(task, peer, consumed_of.get(peer, 0)) for peer in wiring.peers if m != 3]",
        (CAMPAIGN, tests("core/test_sends.py")),
    ),
    Named(
        "finishes before sends",
        "rrfp/core/task_state.py",
        "return not (self._num_sending or self._consumers)",
        "return not self._consumers",
        (CAMPAIGN, tests("core/test_training_step.py")),
    ),
    Named(
        "finishes before credits",
        "rrfp/core/task_state.py",
        "return not (self._num_sending or self._consumers)",
        "return not self._num_sending",
        (CAMPAIGN, tests("core/test_forward_only.py")),
    ),
    Named(
        "finishes before its reduction",
        "rrfp/core/step.py",
        "self.finished = not self.in_flight and not self.unreduced and self.outputs.is_settled",
        "self.finished = not self.in_flight and self.outputs.is_settled",
        (CAMPAIGN, tests("core/test_training_step.py")),
    ),
    Named(
        "early messages lost",
        "rrfp/core/stage_core.py",
        "                self._early.append(event)\n",
        "",
        (CAMPAIGN, tests("core/test_training_step.py")),
    ),
    Named(
        "duplicate arrival taken",
        "rrfp/core/step.py",
        "if source is None or not 0 <= m < self.id.microbatches or source.is_available[m]:",
        "if source is None or not 0 <= m < self.id.microbatches:",
        (CAMPAIGN, tests("core/test_protocol_errors.py")),
    ),
    Named(
        "follower takes a gap in the log",
        "rrfp/core/group_step.py",
        "if sequence != expected:",
        "if sequence < expected:",
        (CAMPAIGN, tests("core/test_group.py")),
    ),
    Named(
        "leader ignores reports",
        "rrfp/core/step.py",
        "            followers=group.num_followers,\n",
        "            followers=0,\n",
        (CAMPAIGN, tests("core/test_group.py")),
    ),
    Named(
        "tree node reports early",
        "rrfp/runtime/all_gather.py",
        "if self._rank not in gathered or not self._reported.get(key, set()).issuperset(self._children):",
        "if self._rank not in gathered:",
        (tests("runtime/test_all_gather.py"),),
    ),
    Named(
        "messages in flight ignored",
        "rrfp/runtime/stall/status.py",
        "    if in_flight:\n",
        "    if False:\n",
        (tests("runtime/test_status.py"),),
    ),
    Named(
        "a bundle that lacks ranks is whole",
        "rrfp/runtime/all_gather.py",
        "return bundle.keys() == wanted",
        "return True",
        (tests("runtime/test_all_gather.py"),),
    ),
    Named(
        "an abort sent to one peer only",
        "rrfp/runtime/abort.py",
        "for peer in transport.context.peers)",
        "for peer in transport.context.peers[:1])",
        (tests("runtime/test_abort.py"),),
    ),
    Named(
        "one poll is enough",
        "rrfp/runtime/stall/status.py",
        "if before is None or [s.progress for s in before] != [s.progress for s in statuses]:",
        "if False:",
        (tests("runtime/test_status.py"),),
    ),
    Named(
        "replicas may differ in whether they reduce",
        "rrfp/runtime/steps/step_report.py",
        "if len(set(reduces)) > 1:",
        "if False:",
        (tests("runtime/test_step_report.py"),),
    ),
    Named(
        "weights of ranks without losses pass",
        "rrfp/runtime/steps/step_report.py",
        "if has is False and",
        "if has is ... and",
        (tests("runtime/test_groups.py"),),
    ),
    Named(
        "settings of a group are not compared",
        "rrfp/runtime/start/handshake.py",
        'self._compare(leader, own, rank, group_settings, "the ranks of a group")',
        "pass",
        (tests("runtime/test_handshake.py"),),
    ),
    Named(
        "a departure before a step is not looked at",
        "rrfp/runtime/stage_runner.py",
        "            self._context.closed_peers.check()\n            self._context.recorder.open()\n",
        "            self._context.recorder.open()\n",
        (tests("runtime/test_departures.py"),),
    ),
    Named(
        "a step begins while another rank is still in the one before",
        "rrfp/runtime/stage_runner.py",
        "            await reporter.settle()\n",
        "",
        (tests("runtime/test_step_ends.py"),),
    ),
    Named(
        "a rank whose caller is elsewhere counts as idle",
        "rrfp/runtime/stall/watchdog.py",
        "not activity.has_returned)",
        "True)",
        (tests("runtime/test_step_ends.py"),),
    ),
    Named(
        "a failure does not reach those who wait for reports",
        "rrfp/runtime/stage_runner.py",
        "        self._reporter.fail(failure)\n",
        "",
        (tests("runtime/test_step_ends.py"),),
    ),
    Named(
        "CLOSED is not looked at inside a step",
        "rrfp/runtime/context.py",
        "        self.check()\n",
        "",
        (tests("runtime/test_departures.py"),),
    ),
    Named(
        "a second failure replaces the first until the caller has received it",
        "rrfp/runtime/abort.py",
        "    def abort(self, failure: Failure) -> None:\n"
        '        """Stop everything here, and notify the peers."""\n'
        "        if self.failure is not None:\n",
        "    def abort(self, failure: Failure) -> None:\n"
        '        """Stop everything here, and notify the peers."""\n'
        "        if self.failure is not None and self.failure.was_raised:\n",
        (tests("runtime/test_abort.py"),),
    ),
    Named(
        "another task is offered beside the offered one",
        "rrfp/arbiter/offers.py",
        "if self.withdraw() and task is not None:",
        "if task is not None:",
        (CAMPAIGN, tests("arbiter/test_offers.py")),
    ),
    Named(
        "a task that the lane has begun is enqueued after the task before it has completed",
        "rrfp/arbiter/arbiter.py",
        "            self._offers.withdraw()\n",
        "            pass\n",
        (CAMPAIGN, tests("arbiter/test_offers.py"), tests("sim/test_shell_equals_engine.py")),
    ),
    Named(
        "tasks are offered under a byte limit",
        "rrfp/arbiter/offers.py",
        " and core.limit.bytes is None",
        "",
        (tests("arbiter/test_offers.py"), tests("sim/test_ready_stays_ready.py")),
    ),
    Named(
        "a call that raised is followed by an offered one",
        "rrfp/compute/lanes/thread.py",
        "        else:\n            self._take_offer()",
        "        finally:\n            self._take_offer()",
        (tests("compute/test_offer_slot.py"),),
    ),
    Named(
        "an offered call comes before those that are enqueued",
        "rrfp/compute/lanes/thread.py",
        "self._calls.empty() and ",
        "",
        (tests("compute/test_offer_slot.py"),),
    ),
    Named(
        "a closed lane keeps what was offered",
        "rrfp/compute/lanes/thread.py",
        "            self.offers.withdraw()\n",
        "            pass\n",
        (tests("compute/test_offer_slot.py"),),
    ),
)
