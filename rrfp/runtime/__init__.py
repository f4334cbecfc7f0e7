"""One rank: its event loop's coroutines, its messages, and all that the ranks agree on beside the tasks.

A message on its way to a task::

    Transport.receive -> Messenger.receive_all -> the handler of its kind -> CoreDriver -> StageCore.apply
                                                                                |
    lane <- LaneExecutor <- CoreDriver <- Arbiter, which asks StageCore.decide <-

OUTPUT and CONSUMED have their handlers in `Messenger`, messages of a group in `rrfp.arbiter`; they become events. The
rest never reaches the core: TIE goes to `GradientFinalizer`, REPORT and RESULT to `TreeAllGather`, PROBE to
`HealthMonitor`, CLOSED to `Departures`, ABORT to `AbortController`. `StageRunner` has the table.

`StageRunner` is a rank's life and the calls of its caller. All its parts share one `RankContext`. A part changes its
own state alone: `Progress` reads that of the others when the rank's idleness is examined.
"""
