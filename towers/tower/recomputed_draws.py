"""Which random ops of a backward pass have to draw the same numbers as the forward pass.

`tf.recompute_grad`, like other ways to recompute activations, calls a function again in the
backward pass: its dropout makes new random ops, and the gradient is only right if these draw the
same mask. In plain TF1 they do where the model gives a seed: two ops of one kind with equal seeds
draw equal numbers. Without a seed, two ops draw two masks, and plain TF's own gradient is wrong.

The backward pass may also draw noise on purpose. So a random op counts as a recomputation only with
a proof: the backward pass computes an input of an operation with a custom gradient again, by the
same operations from the same tensors, and only the random ops are different ones.
"""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.library import has_own_gradient
from towers.graph.op_types import READS

# Operations that read a variable or draw are stateful, and yet the same in a recomputation.


def recomputed_draws(forward, backward):
    """Pairs the random ops of a backward pass with those of the forward pass that they repeat.

    Args:
      forward, backward: lists of operations of one tower, in the order in which they were made.

    Returns:
      {name of a random op of the backward pass: name of the op that it repeats}; ops that are not
      proven to repeat another are left out.
    """
    open_draws = {op.name for op in backward if _draws(op)}
    if not open_draws:
        return {}
    by_type = collections.defaultdict(list)
    for op in backward:
        by_type[op.type].append(op)
    custom = [op for op in forward + backward if has_own_gradient(op)]
    found = {}
    # The gradient of an operation is made under the operation's name. A recomputation within
    # another one is not, and is looked for everywhere.
    for only_under_name in (True, False):
        candidates = collections.defaultdict(set)
        for op in custom:
            mark = '/%s_grad/' % op.name
            for tensor in op.inputs:
                tensor = graph_walk.behind(tensor, ('Identity',))
                for other in by_type[tensor.op.type]:
                    if only_under_name and mark not in '/' + other.name:
                        continue
                    pairs = _same(tensor, other.outputs[tensor.value_index])
                    for one, again in pairs or ():
                        if again in open_draws:
                            candidates[again].add(found.get(one, one))
        for again, origins in candidates.items():
            if len(origins) == 1:  # of two equal ops it cannot be told which one is repeated
                found[again], = origins
        open_draws -= set(candidates)
    return {again: _origin(again, found) for again in found}


def _origin(name, found):
    while name in found:
        name = found[name]
    return name


def _draws(op):
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _same(one, other):
    """Whether two tensors are computed by the same operations from the same tensors and draws.

    Returns:
      List of pairs of names of the ops that draw; None if the tensors differ otherwise.
    """
    pairs, seen = [], set()
    stack = [(one, other)]
    while stack:
        one, other = [graph_walk.behind(each, ('Identity',)) for each in stack.pop()]
        if one.name != other.name and _is_sum_with_zero(other) and not _is_sum_with_zero(one):
            other = _without_zero(other)
        if one.name == other.name or (one.name, other.name) in seen:
            continue
        seen.add((one.name, other.name))
        op, again = one.op, other.op
        if (op.type != again.type or one.value_index != other.value_index
                or len(op.inputs) != len(again.inputs) or not _may_be_repeated(op)
                or _attributes(op) != _attributes(again)):
            return None
        if _draws(op):
            pairs.append((op.name, again.name))
        stack.extend(zip(op.inputs, again.inputs))
    return pairs


def _is_sum_with_zero(tensor):
    return tensor.op.type in ('Add', 'AddV2') and any(map(_is_zero, tensor.op.inputs))


def _without_zero(tensor):
    """The tensor that a zero was added to.

    `tf.recompute_grad` adds a zero that is computed from the gradient, so that nothing is
    recomputed earlier.
    """
    while _is_sum_with_zero(tensor):
        one, other = tensor.op.inputs
        tensor = graph_walk.behind(one if _is_zero(other) else other, ('Identity',))
    return tensor


def _is_zero(tensor):
    """Whether a scalar is 0 (or NaN) whatever values it is computed from."""
    op = tensor.op
    if tensor.shape.ndims != 0:
        return False
    if op.type == 'Const':
        value = tf.make_ndarray(op.get_attr('value'))
        return value.dtype.kind == 'f' and (value == 0 or bool(np.isnan(value)))
    if op.type in ('Cast', 'Identity'):
        return _is_zero(op.inputs[0])
    return op.type in ('Select', 'SelectV2') and all(map(_is_zero, op.inputs[1:]))


def _may_be_repeated(op):
    if not op.inputs:
        return op.type == 'Const'
    return not op.op_def.is_stateful or op.type in READS or _draws(op)


def _attributes(op):
    """The attributes of an operation, without notes (`_class`) and without seeds."""
    return {name: value for name, value in op.node_def.attr.items()
            if not name.startswith('_') and name not in ('seed', 'seed2')}
