"""Recomputation: what the backward pass needs of the forward pass is computed again, not kept."""
