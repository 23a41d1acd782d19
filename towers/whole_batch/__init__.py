"""Values of the whole batch, from those of the shards.

In comes a recorded forward pass, of which `proof` says where the examples are. Out go the pass with
its statistics exchanged between the towers, and the batch's predictions.
Read `batch_values`, `exchange`, `sync_batch_norm`, `exchanged_sums`, then `proven` and
`predictions`.
"""
