"""The recorded forward pass, with what is proven of it: where the examples are in its tensors.

Statistics that a build takes over the whole batch are exchanged here, before the forward pass is
differentiated: the statistics of batch norms in sync, and sums that go into moving averages. The
forward pass is then analysed with the exchanged values.

The tests of the modules that it calls are its tests.
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
      proof: the analysis for a batch of any size; `NO_ANALYSIS` where one tower has the whole
        batch.
      analysis: the analysis of the graph as it was built, for the size that its shard has.
      batch_norms: the batch norms that use the statistics of a shard.
      static_size: how many examples the shard has, where this number is static; else None.
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
      registered: list of the losses that it registered, whether its own loss has them or not.
      request: `Request` of the build.

    Returns:
      `Proven`.

    Raises:
      ModelFunctionError: `batch_sum`, `batch_mean` or `batch_concat` of a value that it cannot be
        taken of; a batch norm to synchronize where towers cannot meet; a product that fails with a
        part of the batch, see `check_products_with_inputs`.
    """
    has_several_parts = request.parts_of_batch > 1
    # One tower that has the whole batch is the program as it was written: nothing is to be proven.
    # On a machine of a cluster a tower has a part of the batch, even if it is the machine's only
    # tower. A tower that evaluates there exchanges nothing with other machines, and so counts as
    # one part; but its plan still says what is proven of a batch over all machines.
    is_program_itself = not has_several_parts and request.has_whole_batch
    if is_program_itself:
        return Proven(output=output, proof=NO_ANALYSIS, analysis=NO_ANALYSIS,
                      batch_norms=NO_BATCH_NORMS, static_size=None, in_sync=0)
    other_fetches = updates + registered  # what the analysis has to reach beside the output
    proof = analyse(operations, inputs, fetches_of(output) + other_fetches)
    analysis = _of_this_graph(proof)
    check_batch_values(operations, analysis)
    in_sync = 0
    if has_several_parts:
        shard_names = operation_names(leaves_of(inputs))
        check_products_with_inputs(operations, analysis, shard_names)
        exchanged = _exchange_statistics(operations, analysis, output, registered, request)
        output = exchanged.output
        in_sync = exchanged.num_batch_norms
        if exchanged.has_changed_graph:
            # The forward pass has new operations: it is analysed once more, with these.
            operations = _operations_since(operations[0])
            proof = analyse(operations, inputs, fetches_of(output) + other_fetches)
            analysis = _of_this_graph(proof)
    batch_norms = find_batch_norms(analysis, operations)
    return Proven(output=output, proof=proof, analysis=analysis, batch_norms=batch_norms,
                  static_size=static_size(inputs), in_sync=in_sync)


def _of_this_graph(proof: Analysis) -> Analysis:
    """The analysis that tells where the examples are in the graph as it is.

    The proof is of a batch of any size. Where the graph takes no batch of another size than the
    program's, the proof ends there, and `as_built` is the analysis for that one size.
    """
    return proof.as_built or proof


class _Exchanged(typing.NamedTuple):
    """A forward pass with statistics of the whole batch."""
    output: ModelOutput  # with these statistics
    num_batch_norms: int  # how many take them
    has_changed_graph: bool  # whether there was a statistic to exchange


def _exchange_statistics(operations: list, analysis: Analysis, output: ModelOutput,
                         registered: list, request: Request) -> _Exchanged:
    """Exchanges the statistics of a forward pass that the request says are to be the batch's.

    Args:
      operations: the operations of the forward pass.
      analysis: the analysis of this graph.
      output, registered, request: see `prove`.
    """
    num_batch_norms = 0
    has_changed_graph = False
    if request.training.batch_norm == 'sync':
        synchronized = synchronize(operations, analysis, tf.get_default_graph())
        num_batch_norms = synchronized.number
        if synchronized.substitutes:
            has_changed_graph = True
            output = _with_substitutes(output, synchronized.substitutes)
    # With 'first' tower 0 writes the averages for all towers, and so needs the sums of the batch.
    # With 'all' each tower writes an average with its own sum, and with 'none' no tower does.
    if request.training.update_ops == 'first':
        outputs = fetches_of(output) + registered
        why_no_exchange = request.no_batch_values  # None where the towers can exchange values
        if exchange_sums(operations, analysis, outputs, why_no_exchange):
            has_changed_graph = True
    return _Exchanged(output, num_batch_norms, has_changed_graph)


def _with_substitutes(output: ModelOutput,
                      substitutes: typing.Dict[str, tf.Tensor]) -> ModelOutput:
    """An output with other tensors in the place of those whose names are keys of `substitutes`."""
    def substitute(leaf: typing.Any) -> typing.Any:
        return substitutes.get(leaf.name, leaf)
    return ModelOutput(*map_leaves(substitute, tuple(output)))


def _operations_since(first: tf.Operation) -> typing.List[tf.Operation]:
    """The operations of the graph, from the operation `first` on, in the order of making."""
    operations = first.graph.get_operations()
    return operations[operations.index(first):]
