"""Messages as bytes: checked headers, and tensors as plain bytes."""
