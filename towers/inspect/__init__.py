"""Checks of a build: the audit of the graph, and the comparison with one device."""
