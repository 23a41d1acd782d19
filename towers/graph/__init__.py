"""Questions about a finished graph: what depends on what, what reads and writes a variable."""
