"""One tower: its shard, its call of the model function, its loss and its gradients."""
