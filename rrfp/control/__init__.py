"""The control plane above a transport: who talks to whom, step results on every rank, finding out why nothing moves."""
