"""One step of a rank: the request, its plan, what ranks tell each other about it, and its result."""
