"""One rank: its event loop's coroutines, its messages, and all that the ranks agree on beside the tasks.

A message on its way to a task::

    transport -> Messenger -> the handler of its kind -> CoreDriver.on_event -> StageCore.apply
                                                               |
    lane <- LaneExecutor <- CoreDriver <- Arbiter, which asks StageCore.decide <-

shm and zmq call `Messenger` where they read a message; others pass it through `Transport.receive`. In shm, `ShmLink`
reads a packet, and `ShmInlet` makes a message of it.

OUTPUT, CONSUMED and BEGUN have their handlers in `Messenger`, messages of a group in `rrfp.arbiter`; they become
events. The rest never reaches the core. `StageRunner.start` has the table, docs/messages.md says what each carries.

`StageRunner` is a rank's life and the calls of its caller. All its parts share one `RankContext`. A part changes its
own state alone: `StallProgress` reads that of the others when the rank's idleness is examined.
"""
