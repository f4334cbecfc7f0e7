"""The part of transports over another one, their carrier, which brings all but the tensors that go another way."""
