"""The state machine of one stage: events in, instructions out, and the hint that ranks ready tasks. Pure."""
