"""Finding out why nothing moves: ranks that stand still, loops that do not answer, deadlocks."""
