"""Operations that cannot be cloned: a clone of them would differ from a call of the model function.

A clone has the same nodes under other names. That is not enough where a node is more than its type,
inputs and attributes: where it keeps state of its own (a table, a queue), calls back into Python,
or is a placeholder. There, towers are built by a call of the model function each.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.variable_access import VARIABLE_OPS


class CannotClone(Exception):
    """Raised within this package; the text is the reason, a clause that completes a sentence."""


def check_shards(shards):
    """Checks that all shards have equal static sizes, which get into the graph as constants.

    Raises:
      CannotClone: the sizes differ.
    """
    first = _static_shapes(shards.inputs[0])
    for inputs, weight in zip(shards.inputs, shards.weights):
        # A float is in the graph as a constant, too.
        if _static_shapes(inputs) != first or (
                isinstance(weight, float) and weight != shards.weights[0]):
            raise CannotClone('shards differ in size')


def _static_shapes(inputs):
    return [None if leaf is None or leaf.shape.ndims is None else leaf.shape.as_list()
            for leaf in tf.nest.flatten(inputs, expand_composites=True)]


_FED = ('Placeholder', 'PlaceholderV2', 'PlaceholderWithDefault')
_CALLS_PYTHON = ('PyFunc', 'EagerPyFunc')  # not PyFuncStateless, which is declared to be pure
_JOINS_OTHERS = ('Collective', 'Nccl', 'Horovod')
_READS = ('ReadVariableOp', 'ResourceGather', 'ResourceGatherNd', 'VarIsInitializedOp',
          'VariableShape')
_ANONYMOUS_STATE = ('Anonymous', 'IteratorFromStringHandle')


def check_state(node, where):
    """Raises `CannotClone` for a node that is more than its type, inputs and attributes.

    Args:
      node: `tf.NodeDef`, of a tower or of a function.
      where: the node's place, for the text.
    """
    reason = None
    if node.op in _FED:
        reason = 'is to be fed'
    elif node.op in _CALLS_PYTHON:
        reason = 'calls a Python function'
    elif node.op.startswith(_JOINS_OTHERS):
        reason = 'meets others of its name'
    elif node.op.startswith(_ANONYMOUS_STATE) or 'shared_name' in node.attr:
        reason = 'keeps state of its own'
    if reason is not None:
        raise CannotClone('%s %s (%s) %s' % (where, node.name, node.op, reason))


def check_outside(names, made, shared, owned, root, inputs, graph):
    """Checks the operations outside of a tower's name scope that the tower's operations read.

    All towers share operations from before the tower, parts of variables, and operations under a
    variable's name that are computed from variables alone (the joined parts of a partitioned
    variable, its L2 loss). Any other operation that the model function's call made outside of the
    scope (under `tf.name_scope(None)` for example) would be made again by another call.

    Args:
      names: names of operations outside of the name scope that are used in it.
      made: the operations that building the tower made.
      shared: names of operations that are for all towers.
      owned: names of operations that are parts of variables.
      root: the name scope of the tower.
      inputs: names of the operations of its shard.
      graph: their graph.

    Raises:
      CannotClone: the call made one of the operations for this tower only; or one is in a loop.
    """
    made = {op.name: op for op in made}
    variables = {variable.op.name for variable in tf.global_variables() + tf.local_variables()}
    for name in names:
        op = graph.get_operation_by_name(name)
        if compat.in_control_flow(op):  # the gradient of a loop reaches into the loop
            raise CannotClone('operation %s, of a loop or branch outside of the tower, is used in '
                              'it' % name)
        if name not in made or name in shared or name in owned:
            continue
        if op.type in _FED:
            continue  # Keras makes one for all towers: its learning phase
        if not _has_name_of(name, variables) or not _follows_from_variables(
                op, made, owned, root, inputs):
            raise CannotClone('operation %s, which the model function made, is outside of the '
                              "tower's name scope" % name)


def _has_name_of(name, variables):
    parts = name.split('/')
    return any('/'.join(parts[:end]) in variables for end in range(1, len(parts) + 1))


def _follows_from_variables(op, made, owned, root, inputs):
    """Whether an operation is the same in each tower: computed from shared variables alone."""
    stack, seen = [op], {op.name}
    while stack:
        op = stack.pop()
        if op.name.startswith(root) or op.name in inputs:
            return False
        if op.name not in made or op.name in owned or op.type in VARIABLE_OPS:
            continue
        if op.op_def.is_stateful and op.type not in _READS:
            return False  # it draws random numbers, say
        for other in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            if other.name not in seen:
                seen.add(other.name)
                stack.append(other)
    return True
