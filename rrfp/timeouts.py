"""Every time limit of the runtime, in seconds, in one place: each outlasts those that it contains.

The first ones are defaults of options of `rrfp.Pipeline`. The others bound the end after a failure, and are
no options. Their order is checked when this is imported. The limits of the conformance suites are in
`rrfp.testing`; they bound no training run.
"""

from __future__ import annotations

from itertools import pairwise

# Defaults of options.

#: ``connect_timeout``: ranks of one job start minutes apart at worst, on hosts that load torch from a slow disk.
CONNECT_S = 60.0

#: ``heartbeat``: how often a silent connection is asked for a heartbeat.
HEARTBEAT_S = 0.5

#: ``patience``: how long a peer may be silent while its connection stands. Suspended machines, live migrations and
#: debuggers stop a process for seconds. A process that has *ended* is noticed without it.
PATIENCE_S = 10.0

#: ``stall_after``: idleness that is worth a question to all ranks; longer than any ordinary wait of a step.
STALL_AFTER_S = 10.0

#: Work of the loop that no rank waits for yet gives way for so long to the threads of the caller and the lane, which
#: need the interpreter's lock for something more urgent.
GIVE_WAY_S = 0.001

#: A task that waits for another thread for so long, and keeps a task of another pipeline from its turn that was begun
#: meanwhile, has asked for that pipeline's result itself, and would wait for ever.
OTHER_THREAD_S = 30.0

# Between two ranks.

#: Consumed bytes are acknowledged after this time at the latest: long beside a task. A sender that waits asks before.
CREDIT_DELAY_S = 0.2

#: The three connections of a peer that dies end together; after the first, the others have so long.
BREAK_GRACE_S = 0.5

#: The last messages of a process that has ended lie in this rank's sockets already: so long to read them.
LAST_MESSAGES_S = 0.5

#: A send failed: so long for ``receive`` to say why, which may take `BREAK_GRACE_S` and `LAST_MESSAGES_S`.
FAREWELL_TIMEOUT_S = 1.0

#: A transfer that both ends of a `P2PChannel` have posted. A dead or silent peer ends it without this limit.
TRANSFER_S = 1800.0

#: How long a rank's loop may take to answer another rank. A loop's callbacks last milliseconds.
ANSWER_S = 1.0

#: `rrfp top` waits so long for a process to report: `ANSWER_S` of that may pass until a rank counts as silent.
STATUS_S = 3.0

#: A program that connects to a status socket and does not read is left after so long.
STATUS_READ_S = 2.0

#: Between two connections to a status socket: a program that connects all the time takes little of the loop.
STATUS_PAUSE_S = 0.05

#: The most that may pass between the idleness that `STALL_AFTER_S` names and the name of the rank at fault on all
#: others: one unanswered question on the way up, one on the way down.
NAMED_S = 2.0

# The end after a failure: the abort's messages, then the reports, then the waits for both.

#: An abort tries to reach the peers for so long.
ABORT_GRACE_S = 1.0

#: An abort that a live rank reports is known everywhere: the promise.
ABORTED_S = 2.0

#: A look at a key of the store that is there, or not: at which pipeline a rank is that did not come.
LOOK_S = 0.5

#: Between two looks at a closed lane whose last call still runs.
OVER_S = 0.005

#: A look at a key of the store that is there already, or has come too late.
GLANCE_S = 0.2

#: A rank that cannot start tells the others within this time, and they end within twice as long.
NOTIFY_S = 1.0

#: The others listen for that while they start: longer than any start.
LISTEN_S = 86400.0

#: The others wait for rank 0's verdict on the start, after its own time is up: the way through the store.
VERDICT_GRACE_S = 2.0

#: A rank that failed at no fault of its own lets the process at fault end first, so that a launcher which looks for
#: the first process to end finds that one.
FAILED_PROCESS_GRACE_S = 4.0

#: After the process at fault has ended: so long until the launcher has surely looked (torchrun: every 0.1 s), also on a
#: host that is overloaded.
LAUNCHER_LOOKS_S = 1.5

#: A collective fails at once when a rank dies and names a connection; within this time the control plane, which may
#: need `FAREWELL_TIMEOUT_S` and `ABORTED_S`, names the rank.
COLLECTIVE_ERROR_S = 4.0

#: A call failed on a device that runs late: so long for the verdict on the calls before it, one of which may be at
#: fault.
DEVICE_VERDICT_S = 1.0

#: After a loss with ``on_lost_rank="finish"``: a rank whose loop does not answer within this time is lost too.
ROLL_CALL_S = 5.0

#: How often a rank that is left then says that it is there.
SIGN_S = 1.0

#: The ranks that are left then wait for each other so long: in a save, for the slowest one's writing.
SURVIVORS_S = 600.0

#: Closing a transport in order waits for peers that do not answer.
TRANSPORT_CLOSE_S = 5.0

#: Leaving in order: the transport's close, and what was sent before it.
RUNNER_CLOSE_S = 6.0

#: Leaving, as the caller sees it: the runner's close on a loop that has other things to do too.
LEAVE_S = 8.0

#: Joining the loop's thread, or the one that watches the loop, after the request to stop.
JOIN_S = 2.0

#: Leaving after a failure waits so long for callbacks, which write the last events; in order it waits for all of them.
CALLBACKS_END_S = 2.0

#: The end of the process waits for calls on lanes: one that returned into an interpreter which is being taken down
#: would end the process by SIGABRT.
EXIT_GRACE_S = 3.0

#: Every process has ended after a failure: the promise.
ENDED_S = 15.0

#: Passing a first piece of shared memory to a peer and back. It takes a millisecond.
TRIAL_S = 5.0

# The rendezvous. Pauses between two looks at the store: short at first, since ranks start together; a rank that waits
# for one that comes minutes later looks at longer intervals.
FIRST_PAUSE_S, LAST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.05, 0.25

# Launchers of our own (the demo).

#: How often a dead launcher is looked for.
WATCH_S = 0.1

#: How often torchrun looks for a dead worker. By its default of 0.1 s it may end the others before they have
#: reported the lost stage.
MONITOR_S = 1.0

#: Workers may be silent for so long: no debugger stops them, and no migration.
WORKERS_PATIENCE_S = 2.0

#: Workers have so long to end after a failure, or after they were asked to.
WORKERS_END_S = 3.0


def _check_order() -> None:
    """Raise AssertionError unless each limit outlasts those that it contains; also under ``python -O``."""
    ladders: tuple[tuple[tuple[str, float], ...], ...] = (
        (("CREDIT_DELAY_S", CREDIT_DELAY_S), ("HEARTBEAT_S", HEARTBEAT_S), ("PATIENCE_S / 3", PATIENCE_S / 3)),
        (("PATIENCE_S", PATIENCE_S), ("CONNECT_S", CONNECT_S), ("TRANSFER_S", TRANSFER_S)),
        (("STALL_AFTER_S", STALL_AFTER_S), ("OTHER_THREAD_S", OTHER_THREAD_S)),
        (("2 * ANSWER_S", 2 * ANSWER_S), ("NAMED_S", NAMED_S), ("STALL_AFTER_S", STALL_AFTER_S)),
        (("STATUS_PAUSE_S", STATUS_PAUSE_S), ("ANSWER_S", ANSWER_S), ("STATUS_S", STATUS_S)),
        (("BREAK_GRACE_S", BREAK_GRACE_S), ("FAREWELL_TIMEOUT_S", FAREWELL_TIMEOUT_S), ("ABORTED_S", ABORTED_S)),
        (("DEVICE_VERDICT_S", DEVICE_VERDICT_S), ("ABORTED_S", ABORTED_S)),
        (("TRIAL_S", TRIAL_S), ("CONNECT_S", CONNECT_S)),
        (("LOOK_S", LOOK_S), ("VERDICT_GRACE_S", VERDICT_GRACE_S)),
        (("ABORTED_S", ABORTED_S), ("ROLL_CALL_S", ROLL_CALL_S), ("SURVIVORS_S", SURVIVORS_S)),
        (("3 * SIGN_S", 3 * SIGN_S), ("ROLL_CALL_S", ROLL_CALL_S)),
        (("GLANCE_S", GLANCE_S), ("LOOK_S", LOOK_S), ("NOTIFY_S", NOTIFY_S), ("ABORTED_S", ABORTED_S)),
        (("LAST_MESSAGES_S", LAST_MESSAGES_S), ("FAREWELL_TIMEOUT_S", FAREWELL_TIMEOUT_S)),
        (("ABORT_GRACE_S", ABORT_GRACE_S), ("ABORTED_S", ABORTED_S), ("TRANSPORT_CLOSE_S", TRANSPORT_CLOSE_S)),
        (
            ("FAREWELL_TIMEOUT_S + ABORTED_S", FAREWELL_TIMEOUT_S + ABORTED_S),
            ("COLLECTIVE_ERROR_S", COLLECTIVE_ERROR_S),
        ),
        (
            ("ABORTED_S", ABORTED_S),
            ("FAILED_PROCESS_GRACE_S", FAILED_PROCESS_GRACE_S),
            ("RUNNER_CLOSE_S", RUNNER_CLOSE_S),
        ),
        (("3 * HEARTBEAT_S", 3 * HEARTBEAT_S), ("WORKERS_PATIENCE_S", WORKERS_PATIENCE_S), ("PATIENCE_S", PATIENCE_S)),
        (("MONITOR_S", MONITOR_S), ("WORKERS_END_S", WORKERS_END_S)),
        (
            ("TRANSPORT_CLOSE_S", TRANSPORT_CLOSE_S),
            ("RUNNER_CLOSE_S", RUNNER_CLOSE_S),
            ("RUNNER_CLOSE_S + JOIN_S", RUNNER_CLOSE_S + JOIN_S),
            ("LEAVE_S", LEAVE_S),
            (
                "LEAVE_S + JOIN_S + CALLBACKS_END_S + EXIT_GRACE_S",
                LEAVE_S + JOIN_S + CALLBACKS_END_S + EXIT_GRACE_S,
            ),
            ("ENDED_S", ENDED_S),
        ),
        (
            ("FAILED_PROCESS_GRACE_S + LAUNCHER_LOOKS_S", FAILED_PROCESS_GRACE_S + LAUNCHER_LOOKS_S),
            ("LEAVE_S", LEAVE_S),
        ),
    )
    for ladder in ladders:
        for (inner, less), (outer, more) in pairwise(ladder):
            if less > more:
                raise AssertionError(f"{inner} is {less} s, must be at most {outer}, which is {more} s")


_check_order()
