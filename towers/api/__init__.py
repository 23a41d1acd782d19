"""`build_towers`: the way of a batch from top to bottom, and the plan."""
