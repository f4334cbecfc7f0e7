"""Messages between the ranks of one pipeline: the contract in `base`, and its implementations."""
