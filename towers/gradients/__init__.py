"""The backward pass of a tower.

In comes the recorded forward pass with its losses. Out goes a `Tower`: the model on one device,
with this tower's share of each variable's gradient.
Read `tower`, `backward_pass`, then `gradient_pairs`, `optimizer_methods` and `stateless_random`.
"""
