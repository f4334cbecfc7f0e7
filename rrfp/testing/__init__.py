"""Tools for tests: the reference, conformance suites, and ways to order and break things; for plugin authors too."""
