"""Tools for tests: the reference, conformance suites, and ways to break things; for plugin authors too."""
