"""Which operations of a tower provably compute the same value in every tower of a step.

A term of the loss that is the same in every tower may stay in every tower's loss: the towers'
weights add up to 1 (mean) or N (sum), so it counts once either way. To compute it once, outside of
the towers, is an optimisation, and an optimisation needs a proof. So this module counts as varying
every operation that it does not know to be invariant.
"""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW, PLACEHOLDERS, READS, VARIABLE_OPS
from towers.graph.variable_access import initializers
from towers.graph.variable_writes import Writes

# A branch or a loop may depend on data by control alone. A placeholder may be fed tower by tower.
_DOUBTFUL = CONTROL_FLOW | PLACEHOLDERS | {'ControlTrigger'}


def varying_operations(made, inputs):
    """The names of the operations that may differ from tower to tower.

    An operation counts as varying if it depends, by data or by control edges, on

    * the shard;
    * an operation made in the tower that is stateful (random numbers, iterators, queues, Python
      functions, assertions), a placeholder, a part of control flow, a call of a function, or of a
      type unknown to TensorFlow;
    * a variable that the tower writes.

    An operation from before the towers has one value for all of them.

    Args:
      made: the operations that a call of the model function made.
      inputs: the operations of the tower's shard.

    Returns:
      A set of names. An operation of `made` that is not in it is proven to be the same.
    """
    is_pure = {}  # by type of operation
    sources, reads = list(inputs), []
    for op in made:
        if op.type not in is_pure:
            is_pure[op.type] = _is_pure(op)
        if not is_pure[op.type]:
            sources.append(op)
    for variable in written_variables(made):
        sources.append(variable)
        # A reference variable's own read may have been made before the tower.
        reads.extend(variable.outputs[0].consumers())
    return graph_walk.reachable_from(sources, list(made) + reads, control=True)


def written_variables(made):
    """The operations of the variables that any of the operations `made` may write.

    The operation that gives a variable its initial value does not count.
    """
    graph, left_out = tf.get_default_graph(), initializers()
    writes = Writes(graph)
    names = {name for op in made if op.name not in left_out for name in writes.of(op)}
    return [graph.get_operation_by_name(name) for name in sorted(names)]


def _takes_reference(op):
    return any(argument.is_ref for argument in op.op_def.input_arg) or (
        op.type == 'RefIdentity')


def _is_pure(op):
    """Whether the value of operations of this type depends on their inputs alone."""
    if op.type in VARIABLE_OPS or op.type in READS or op.type == 'VariableShape':
        return True
    definition = op.op_def
    return (op.type not in _DOUBTFUL and hasattr(tf.raw_ops, op.type)
            and not definition.is_stateful and not _takes_reference(op)
            and not any(attribute.type in ('func', 'list(func)')
                        for attribute in definition.attr))
