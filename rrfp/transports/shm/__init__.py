"""Messages within one host: headers over Unix sockets, tensors in shared memory that the receiver uses in place."""
