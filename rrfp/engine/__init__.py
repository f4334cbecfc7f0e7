"""The engine: drives the real core on virtual time, beside the lower bound on the makespan."""
