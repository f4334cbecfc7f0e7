"""Before the first step: settings compared through the store, and a start that fails on one rank told to all."""
