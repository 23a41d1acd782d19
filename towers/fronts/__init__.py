"""Fronts: the ways that legacy code comes in by."""
