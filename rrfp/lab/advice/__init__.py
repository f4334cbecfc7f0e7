"""What slows recorded steps down, and what a setting would change: `rrfp advise` and ``pipe.advise()``."""
