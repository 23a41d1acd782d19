"""The operations that compute an update, by variable, where each worker makes it itself.

They stand between the gradients of all workers and what the step writes. What is computed from this
worker's own batch is none of them: it holds a number of examples, say. A number that is fed, such
as a learning rate, is no batch: what is computed with it is compared.
"""

import collections
import re

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors, is_random, reachable_from, step_operations
from towers.graph.variable_access import VARIABLE_OPS
from towers.graph.variable_writes import Writes
from towers.tower.objectives import tensors_of

_ADDED_UP = ('Collective', 'Horovod')
"""Beginnings of types of operations whose results are the same on all workers: counts, say."""

_DATA = re.compile('Iterator|Dequeue|Dataset|ReaderRead|ReadFile|Unstage|BarrierTakeMany')
"""Types of operations that bring in data."""


def parts_of_updates(cluster, built):
    """What writes each variable in a step, and is computed from the sums over the workers.

    An operation that several variables share counts for the first of them, in the order of names;
    trained ones come first.

    Args:
      cluster: `Cluster`.
      built: `BuiltTowers`.

    Returns:
      `OrderedDict` from names of variables to lists of operations. Empty where the chief makes the
      one update for all.
    """
    parts = collections.OrderedDict()
    if cluster.num_workers == 1 or cluster.kind == 'ps' and cluster.synchronous:
        return parts
    step = step_operations([built.train_op])
    ends = [tensor.op for tensor in tensors_of(built.machines.combined)] + [
        op for op in step if op.type.startswith(_ADDED_UP)]
    writing = _writing(built, step, ends)
    seen = {op.name for op in ends} | _of_own_batch(built, step, ends) | set(built.machines.made)
    trained = {variable.op.name for _, variable in built.gradients}
    for name in sorted(writing, key=lambda name: (name not in trained, name)):
        parts[name] = _computing(writing[name], seen)
    return parts


def _writing(built, step, ends):
    """{name of a variable: the operations of the step that write it from the gradients}.

    Of trained variables all writes of the program count, such as a decay of weights.
    """
    machines = built.machines
    trained = {variable.op.name for _, variable in built.gradients}
    known = trained | {variable.op.name for variable in tf.global_variables()}
    after, writes = reachable_from(ends, step), Writes(tf.get_default_graph())
    writing = {}
    for op in step:
        for name in writes.of(op) if op.name not in machines.made else ():
            if name in trained or name in known and op.name in after:
                writing.setdefault(name, []).append(op)
    return writing


def _of_own_batch(built, step, ends):
    """Names of the operations that depend on this worker's batch, but for the sums `ends`.

    The batch is what the inputs of the towers are computed from, and what else is read from a
    pipeline. A placeholder that is in none of them is fed with a number.
    """
    ended = {op.name for op in ends}
    given = [tensor for tensor in tf.nest.flatten(
        [tower.inputs for tower in built.towers], expand_composites=True)
             if isinstance(tensor, tf.Tensor)]
    inputs = ancestors(given)
    # Behind these there may be nothing but constants: data all the same, unless it is a number.
    shards = [tensor.op for tensor in given if tensor.shape.ndims != 0]
    before = [op for op in step if op.name not in ended]
    return reachable_from(shards + [
        op for op in before if is_random(op) or _DATA.search(op.type) or op.name in inputs and not (
            op.inputs or op.type == 'Const' or op.type in VARIABLE_OPS)], before)


def _computing(operations, seen):
    """The operations that some operations are computed from, and these; adds to the names `seen`.
    """
    stack, found = list(operations), []
    seen.update(op.name for op in stack)
    while stack:
        op = stack.pop()
        found.append(op)
        # Of what is printed, the first input alone goes on.
        for tensor in op.inputs[:1] if op.type == 'Print' else op.inputs:
            if tensor.op.name not in seen:
                seen.add(tensor.op.name)
                stack.append(tensor.op)
    return found
