"""The commands of the console script, a module each; every one imports what it needs when it runs."""
