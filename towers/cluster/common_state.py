"""State that training reads and that each worker would write from its own batch.

A moving average that the model reads while it trains (batch renormalization, a codebook, a running
mean that inputs are centred by) is on one machine what the first tower writes. In a ring every
worker has a copy, and writes it from its own batch: the copies would drift apart, and a run that
resumes would go on with worker 0's. So worker 0's values go to all after each step. What training
only writes, such as the moving averages of batch norm, needs no message: worker 0 saves its own.
"""

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors, step_operations
from towers.graph.variable_writes import Writes

_MOST_OF_COUNTER = 12  # operations
_COUNTS = frozenset(['Const', 'Identity', 'Cast', 'Add', 'AddV2', 'Sub', 'ReadVariableOp',
                     'VarHandleOp', 'Variable', 'VariableV2', 'NoOp'])


def read_by_training(gradients, update, trained):
    """The variables that one worker has to give to the others after each step.

    Args:
      gradients: list of the gradients of this machine, tensors and `IndexedSlices`.
      update: the operation of the step.
      trained: the variables that the update trains, the same on all workers.

    Returns:
      List of variables: global ones that the step writes, by something else than a count of a
      constant, and that the gradients are computed from.
    """
    tensors = []
    for gradient in gradients:
        tensors += ([gradient.values, gradient.indices]
                    if isinstance(gradient, tf.IndexedSlices) else [gradient])
    read, known = ancestors(tensors), {variable.op.name for variable in trained}
    found = [variable for variable in tf.global_variables()
             if variable.op.name in read and variable.op.name not in known]
    if not found:
        return []
    step, writes = {op.name for op in step_operations([update])}, Writes(tf.get_default_graph())
    return [variable for variable in found if any(
        op.name in step and not _counts(op, variable) for op in writes.to(variable))]


def _counts(write, variable):
    """Whether a write adds a constant to a variable, as that of the global step does."""
    stack, seen = [write], {write.name: write}
    while stack and len(seen) <= _MOST_OF_COUNTER:
        for tensor in stack.pop().inputs:
            if tensor.op.name not in seen:
                seen[tensor.op.name] = tensor.op
                stack.append(tensor.op)
    return len(seen) <= _MOST_OF_COUNTER and all(
        op.name == write.name or op.type in _COUNTS and op.outputs and (
            op.outputs[0].dtype == tf.resource or op.outputs[0].shape.num_elements() == 1)
        and (not op.type.startswith('Var') or op.name == variable.op.name) for op in seen.values())
