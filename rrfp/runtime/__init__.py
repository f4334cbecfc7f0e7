"""One rank at work: its event loop's coroutines, its messages, and all that the ranks agree on beside the tasks."""
