"""The description of a job: tasks, stages, graphs, schedules and the mesh of ranks. Pure."""
