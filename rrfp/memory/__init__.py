"""Limits on memory: the rules of admission, sizes seen so far and the ledger of held bytes. Pure."""
