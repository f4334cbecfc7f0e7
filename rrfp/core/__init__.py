"""The pure core: tasks, the dependency graph, readiness, admission, and the state machine of one stage.

Nothing in here knows asyncio, a clock, torch, a socket or a thread.
"""
