"""The computation of a rank: stage programs, and the lanes that run them."""
