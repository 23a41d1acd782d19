"""From the gradients of all towers to one update."""
