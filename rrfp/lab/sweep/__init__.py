"""Many simulated runs: workloads by methods by seeds."""
