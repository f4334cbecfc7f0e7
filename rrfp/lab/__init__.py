"""The laboratory: simulators, explorers, fault campaigns, doubles and readers of traces. No training job imports it."""
