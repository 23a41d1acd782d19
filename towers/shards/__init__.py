"""The batch, and its shard for each tower.

In comes a nest of input tensors, with the devices or shares of the towers. Out goes a `CutBatch`:
the shards, cut on the CPU, and their weights (examples of the shard over examples of the batch).
Read `batch_inputs`, then `cut_batch`; `cut_inputs` is for batches that are cut before the build.
"""
