"""The numbers that an update computes with, to be compared among workers that each make it.

A custom optimizer writes a weight by operations of any kind, such as `v.assign(v - rate * g)`; what
of it is a learning rate, nothing tells. So all constants count that stand between the gradients and
what the step writes, by variable and without an order: neither names of operations nor the order in
which they were made have to be the same. What is computed from this worker's own batch does not
count: its constants may hold a number of examples.
"""

import collections
import zlib

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import functions_of, is_random, reachable_from, step_operations
from towers.graph.variable_access import VARIABLE_OPS
from towers.graph.variable_writes import Writes
from towers.tower.objectives import tensors_of

_ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers: counts, say."""

_MOST_NUMBERS = 64  # of a constant whose numbers are compared one by one
_MOST_SAID = 5  # numbers in a message


def constants_of_updates(cluster, built):
    """The constants of the update, where each worker makes it itself.

    A constant that several variables share counts for the first of them, in the order of names.

    Args:
      cluster: `Cluster`.
      built: `BuiltTowers`.

    Returns:
      List of `[constants, names of variables]`, both sorted lists of strings. A text stands for a
      number. Empty where the chief makes the one update for all.
    """
    if cluster.num_workers == 1 or cluster.kind == 'ps' and cluster.synchronous:
        return []
    step = step_operations([built.train_op])
    ends = [tensor.op for tensor in tensors_of(built.machines.combined)] + [
        op for op in step if op.type.startswith(_ADDED_UP)]
    writing = _writing(built, step, ends)
    shards = [leaf.op for tower in built.towers
              for leaf in tf.nest.flatten(tower.inputs, expand_composites=True)
              if leaf is not None]
    seen = {op.name for op in ends} | _of_own_batch(step, ends, shards)
    functions, by_constants = _Functions(), {}
    trained = {variable.op.name for _, variable in built.gradients}
    for name in sorted(writing, key=lambda name: (name not in trained, name)):
        constants = _constants(writing[name], seen, functions)
        by_constants.setdefault(tuple(sorted(constants)), []).append(name)
    return [[list(constants), names] for constants, names in sorted(by_constants.items())]


def difference_of_constants(own, other):
    """How a worker's `constants_of_updates`, `other`, differ from worker 0's: a clause, or None."""
    ours, theirs = [{name: constants for constants, names in each for name in names}
                    for each in (own, other)]
    for name in sorted(set(ours) & set(theirs)):
        mine, yours = [collections.Counter(each[name]) for each in (ours, theirs)]
        if mine != yours:
            return ('its update of %r computes with %s, and that of worker 0 with %s' % (
                name, _few(yours - mine), _few(mine - yours)))
    return None


def _few(numbers):
    numbers = sorted(numbers.elements())
    return ', '.join(numbers[:_MOST_SAID] + ['…'] * (len(numbers) > _MOST_SAID)) or (
        'fewer numbers')


def _writing(built, step, ends):
    """{name of a variable: the operations of the step that write it from the gradients}.

    Of trained variables all writes count, such as a decay of weights.
    """
    trained = {variable.op.name for _, variable in built.gradients}
    known = trained | {variable.op.name for variable in tf.global_variables()}
    after, writes = reachable_from(ends, step), Writes(tf.get_default_graph())
    writing = {}
    for op in step:
        for name in writes.of(op):
            if name in trained or name in known and op.name in after:
                writing.setdefault(name, []).append(op)
    return writing


def _of_own_batch(step, ends, shards):
    """Names of the operations that depend on this worker's batch, but for the sums `ends`.

    Args:
      step: the operations of a step.
      ends: the operations of the sums over the workers.
      shards: the operations of the towers' inputs, behind which there may be nothing but constants.
    """
    ended = {op.name for op in ends}
    before = [op for op in step if op.name not in ended]
    return reachable_from(shards + [op for op in before if is_random(op) or not (
        op.inputs or op.type == 'Const' or op.type in VARIABLE_OPS)], before)


def _constants(operations, seen, functions):
    """Texts of the constants that some operations are computed from; adds to the names `seen`."""
    stack, found = list(operations), []
    seen.update(op.name for op in stack)
    while stack:
        op = stack.pop()
        if op.type == 'Const':
            found += _texts(op.get_attr('value'))
        elif op.type not in VARIABLE_OPS:
            found += functions.constants(op.node_def)
        # Of what is printed, the first input alone goes on.
        for tensor in op.inputs[:1] if op.type == 'Print' else op.inputs:
            if tensor.op.name not in seen:
                seen.add(tensor.op.name)
                stack.append(tensor.op)
    return found


def _texts(constant):
    value = tf.make_ndarray(constant)
    if constant.dtype == tf.bfloat16.as_datatype_enum:
        value = value.astype('float32')
    if value.dtype.kind not in 'biuf':
        return []
    if value.size > _MOST_NUMBERS:
        return ['%d numbers (checksum %08x)' % (value.size, zlib.crc32(value.tobytes()))]
    return ['%.9g' % each for each in value.reshape(-1).tolist()]


class _Functions:
    """The functions of the default graph: bodies of branches and loops, say."""

    def __init__(self):
        self._graph, self._known = tf.get_default_graph(), None

    def constants(self, node):
        """Texts of the constants in the functions that a node calls, and in those they call."""
        stack, seen, found = [node], set(), []
        while stack:
            for name in functions_of(stack.pop()) - seen:
                seen.add(name)
                for inner in self._nodes(name):
                    if inner.op == 'Const':
                        found += _texts(inner.attr['value'].tensor)
                    else:
                        stack.append(inner)
        return found

    def _nodes(self, name):
        if self._known is None:
            self._known = {each.signature.name: each.node_def for each in
                           self._graph.as_graph_def().library.function}
        return self._known.get(name, ())
