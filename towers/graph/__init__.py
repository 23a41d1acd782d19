"""Questions about a finished piece of graph: what depends on what, what reads and writes a variable."""
