"""Where tasks compute and what they compute: lanes and stage programs."""
