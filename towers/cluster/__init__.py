"""Several machines: TensorFlow's ring, its parameter servers, Horovod.

In come a `Cluster`, the gradients of this machine's towers, and the graph of a build; out go the
gradients over all machines with the operation of a step (`Machines`), and the `Member` by which a
worker trains together with the others. Read in this order:

- the arguments: `addresses`, `cluster`;
- the graph: `machines`, `worker_step`, then an engine: `ring` (with `collectives`, `ring_rows` and
  `sent_types`), `parameter_servers` (with `server_placement`), or `horovod`;
- the run: `member`, `signature` (what workers compare at the start), `connection` and `coordinator`
  (who speaks, and who answers), `sessions`, `between_steps`.
"""
