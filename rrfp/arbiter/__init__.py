"""The arbiter: the coroutine that dispatches what the core decides."""
