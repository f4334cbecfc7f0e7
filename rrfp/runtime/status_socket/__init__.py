"""The Unix socket of a process at which the user of a job looks at it, and its reader. See `rrfp top`."""
