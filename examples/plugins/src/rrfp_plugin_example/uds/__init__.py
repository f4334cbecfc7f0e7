"""A transport over unix domain sockets, for ranks of one Linux host."""
