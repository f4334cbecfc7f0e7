"""One rank: its event loop's coroutines, its messages, and all that the ranks agree on beside the tasks.

A message on its way to a task::

    Transport.receive -> Messenger.receive_all -> the handler of its kind -> CoreDriver -> StageCore.apply
                                                                                |
    lane <- LaneExecutor <- CoreDriver <- Arbiter, which asks StageCore.decide <-

OUTPUT, CONSUMED and BEGUN have their handlers in `Messenger`, messages of a group in `rrfp.arbiter`; they become
events. The rest never reaches the core. `StageRunner.start` has the table, docs/messages.md says what each carries.

`StageRunner` is a rank's life and the calls of its caller. All its parts share one `RankContext`. A part changes its
own state alone: `StallProgress` reads that of the others when the rank's idleness is examined.
"""
