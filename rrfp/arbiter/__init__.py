"""The arbiter: dispatches the decisions of the core, alone or in agreement with a group."""
