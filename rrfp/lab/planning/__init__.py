"""Which cut, placement, limit, hint and split would make recorded steps shortest: `rrfp plan`."""
