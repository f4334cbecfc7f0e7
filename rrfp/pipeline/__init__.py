"""The public API: a Pipeline, its options, and the builder of its running ranks."""
