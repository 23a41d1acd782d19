"""State that training reads and that each worker would write from its own batch.

A moving average that the model reads while it trains (batch renormalization, a codebook, a running
mean that inputs are centred by) is on one machine what the first tower writes. In a ring every
worker has a copy, and writes it from its own batch: the copies would drift apart, and a run that
resumes would go on with worker 0's. So worker 0's values go to all after each step. What training
only writes, such as the moving averages of batch norm, needs no message: worker 0 saves its own.
What the update reads, see `update_state`.
"""

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors, step_operations
from towers.graph.variable_writes import Writes

_MOST_OF_COUNTER = 12  # operations
_COUNTS = frozenset(['Const', 'Identity', 'Cast', 'Add', 'AddV2', 'Sub', 'ReadVariableOp',
                     'VarHandleOp', 'Variable', 'VariableV2', 'NoOp'])

_ADDS = ('Add', 'Sub', 'AssignAdd', 'AssignSub')  # beginnings of types of operations


def read_by_training(gradients, update, trained, before=(), same_batches=True):
    """The variables that one worker has to give to the others after each step.

    Args:
      gradients: list of the gradients of this machine, tensors and `IndexedSlices`.
      update: the operation of the step.
      trained: the variables that the update trains, the same on all workers.
      before: list of the tensors and operations that the optimizer waits for: those of the model.
      same_batches: whether each worker has the same number of examples in each step. If not, what
        the model counts may be examples, or steps in which the worker still has data.

    Returns:
      List of variables: global ones that the step writes, by something else than a count that is
      the same on all workers, and that the gradients are computed from.
    """
    found = read_from_state(gradients, trained)
    if not found:
        return []
    step, writes = _written(update)
    models = set() if same_batches else {op.name for op in step_operations(before)}
    return [variable for variable in found if any(
        op.name in step and (op.name in models or counted(op, variable) is None)
        for op in writes.to(variable))]


def counts_of_model(variables, update, before):
    """What the model adds to its counters in a step: dict from names of variables to texts.

    Workers of equal batches do not send each other such counters: the constants have to be the
    same.

    Args:
      variables: list of the variables to look at.
      update: the operation of the step.
      before: as for `read_by_training`.
    """
    models = {op.name for op in step_operations(before)}
    step, writes = _written(update)
    found = {}
    for variable in variables:
        for op in writes.to(variable):
            constants = counted(op, variable) if op.name in models and op.name in step else None
            if constants:
                found.setdefault(variable.op.name, []).extend(
                    '%.9g' % tf.make_ndarray(each.get_attr('value')) for each in constants)
    return {name: ' '.join(sorted(texts)) for name, texts in found.items()}


def read_from_state(gradients, trained):
    """The global variables, but for the trained ones, that gradients are computed from."""
    tensors = []
    for gradient in gradients:
        tensors += ([gradient.values, gradient.indices]
                    if isinstance(gradient, tf.IndexedSlices) else [gradient])
    read, known = ancestors(tensors), {variable.op.name for variable in trained}
    return [variable for variable in tf.global_variables()
            if variable.op.name in read and variable.op.name not in known]


def _written(update):
    """(names of the operations of a step, `Writes` of the graph)."""
    return {op.name for op in step_operations([update])}, Writes(tf.get_default_graph())


def counted(write, variable):
    """The constants that a write adds to a variable, or takes off, as that of the global step does.

    None where the write is another one.
    """
    stack, seen = [write], {write.name: write}
    while stack and len(seen) <= _MOST_OF_COUNTER:
        for tensor in stack.pop().inputs:
            if tensor.op.name not in seen:
                seen[tensor.op.name] = tensor.op
                stack.append(tensor.op)
    adds = any(op.type.startswith(_ADDS) for op in seen.values())
    if adds and len(seen) <= _MOST_OF_COUNTER and all(
            op.name == write.name or op.type in _COUNTS and op.outputs and (
                op.outputs[0].dtype == tf.resource or op.outputs[0].shape.num_elements() == 1)
            and (not op.type.startswith('Var') or op.name == variable.op.name)
            for op in seen.values()):
        return [op for op in seen.values() if op.type == 'Const']
    return None
