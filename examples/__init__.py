"""Short programs, each runnable: what the docs show, in full."""
