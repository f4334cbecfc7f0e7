"""The public way in: a Pipeline, its options, and how it becomes running ranks."""
