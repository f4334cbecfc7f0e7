"""How messages move between the ranks of one pipeline: the contract in `base`, and what keeps it."""
