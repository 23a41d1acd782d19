"""The recorded forward pass, with what is proven of it: where the examples are in its tensors.

Statistics that a build takes over the whole batch, of batch norms in sync and of sums that go into
averages, are exchanged here, before the forward pass is differentiated; the analysis is then made
of the pass with these values.

Its tests are those of what it calls.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import leaves_of, map_leaves, operation_names
from towers.model.outputs import ModelOutput, fetches_of
from towers.model.request import Request
from towers.proof.analysis import NO_ANALYSIS, Analysis, analyse
from towers.proof.batch_norms import NO_BATCH_NORMS, BatchNorms, find_batch_norms
from towers.proof.stand_ins import static_size
from towers.whole_batch.batch_values import check_batch_values
from towers.whole_batch.exchanged_sums import exchange_sums
from towers.whole_batch.products_with_inputs import check_products_with_inputs
from towers.whole_batch.sync_batch_norm import synchronize


class Proven(typing.NamedTuple):
    """A forward pass and what is proven of it.

    Attributes:
      output: what the model function returned, with the exchanged values in the place of the
        shard's.
      proof: of a batch of any size; `NO_ANALYSIS` where one tower has the whole batch.
      analysis: of the graph as it was built, for the size that its shard has.
      batch_norms: those that use the statistics of a shard.
      static_size: examples of the shard, where that is static.
      in_sync: how many batch norms have the statistics of the whole batch.
    """
    output: ModelOutput
    proof: Analysis
    analysis: Analysis
    batch_norms: BatchNorms
    static_size: typing.Optional[int]
    in_sync: int


def prove(operations: list, inputs: typing.Any, output: ModelOutput, updates: list,
          registered: list, request: Request) -> Proven:
    """Analyses a recorded forward pass; exchanges the statistics that are to be the batch's.

    Args:
      operations: list of the operations of the call of the model function.
      inputs: the shard that it was called with.
      output: `ModelOutput` that it returned.
      updates: list of its updates.
      registered: list of the losses that it registered, in its own loss or not.
      request: `Request` of the build.

    Returns:
      `Proven`.

    Raises:
      ModelFunctionError: `batch_sum`, `batch_mean` or `batch_concat` of a value that it cannot be
        taken of; a batch norm to synchronize where towers cannot meet; a product that fails with a
        part of the batch, see `check_products_with_inputs`.
    """
    if request.parts_of_batch == 1 and request.has_whole_batch:
        return Proven(output, NO_ANALYSIS, NO_ANALYSIS, NO_BATCH_NORMS, None, 0)
    graph = tf.get_default_graph()
    first_operation = operations[0] if operations else None
    fetches = fetches_of(output) + updates + registered
    proof = analyse(operations, inputs, fetches)
    analysis = proof.as_built or proof
    check_batch_values(operations, analysis)
    has_several_parts = request.parts_of_batch > 1
    if has_several_parts:
        check_products_with_inputs(operations, analysis, operation_names(leaves_of(inputs)))
    instead: typing.Dict[str, tf.Tensor] = {}
    in_sync = 0
    if request.training.batch_norm == 'sync' and has_several_parts:
        in_sync, instead = synchronize(operations, analysis, graph)
    has_exchanged_sums = False
    if request.training.update_ops == 'first' and has_several_parts:
        outputs = fetches_of(_with_exchanged(output, instead)) + registered
        has_exchanged_sums = exchange_sums(operations, analysis, outputs, request.no_batch_values)
    if instead or has_exchanged_sums:
        output = _with_exchanged(output, instead)
        operations = _operations_since(first_operation)
        proof = analyse(operations, inputs, fetches_of(output) + updates + registered)
        analysis = proof.as_built or proof
    batch_norms = find_batch_norms(analysis, operations)
    return Proven(output, proof, analysis, batch_norms, static_size(inputs), in_sync)


def _with_exchanged(output: ModelOutput, instead: typing.Dict[str, tf.Tensor]) -> ModelOutput:
    """An output with other tensors in the place of those whose names are keys of `instead`."""
    def substitute(leaf: typing.Any) -> typing.Any:
        return instead.get(leaf.name, leaf)
    return ModelOutput(*map_leaves(substitute, tuple(output)))


def _operations_since(first: tf.Operation) -> typing.List[tf.Operation]:
    """The operations of a graph from one of them on."""
    operations = first.graph.get_operations()
    return operations[operations.index(first):]
