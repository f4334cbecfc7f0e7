"""Where a rank computes, one task at a time."""
