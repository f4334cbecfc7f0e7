"""Backward in two parts: the gradients of inputs first, those of weights later."""
