"""Pipeline times tensor parallelism in virtual time: one real core a rank."""
