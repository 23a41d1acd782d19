"""Writes of shared variables by values that come from the examples.

Tower 0 may write for all towers what is the same in all of them, and averages of a statistic of its
examples, such as batch norm's: new = a old + b statistic, with 0 < a < 1, where the statistic is no
sum over the examples; with a = 0 it has to be a mean over them. Rows that belong to examples (class
centers, memory banks), each computed from its example alone, and counts of examples are written by
every tower, after all towers have read, tower by tower. A value that follows from the whole batch
in another way can be no tower's: it is refused.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.op_types import ADDS, CHOICES, QUOTIENTS, SAME_NUMBERS, SETS, SUMS
from towers.graph.variable_access import Writes, read_from
from towers.tower.across_examples import added_up, mixed
from towers.tower.sync_batch_norm import statistics_of

_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg'}


def written_by_every_tower(recorded, writes, size, request):
    """Names of the variables that every tower writes: a set.

    Args:
      writes: list of `Write`: those of shared variables that a step of tower 0 runs.
      size: examples in tower 0's shard: an int, or a tensor.

    Raises:
      SharedVariableError: a write of the examples that no tower, and not every tower, can make.
    """
    served, found = request.served_rank is not None, set()
    if not writes or request.update_ops != 'first' or len(request.parts) == 1 and not served:
        return found
    others = 'servers' if served else 'copies' if request.has_copies else None
    finder = Writes(tf.get_default_graph())
    depends = _Dependence({name for write in writes for name in write.variables},
                          recorded.operations)
    for op, names in writes:
        has_rows_inside = op.name in recorded.from_shard and any(
            'Scatter' in node.op for each in finder.functions(op) for node in each.node_def)
        if any([_is_of_every_tower(op, name, recorded.from_shard, depends, size)
                for name in names]) or has_rows_inside:
            _check(op, names[0], depends, others, has_rows_inside)
            if 'Scatter' in op.type:
                _check_rows(op, names[0], recorded)
            found.update(names)
    return found


def _check(op, name, depends, others, has_rows_inside):
    """Refuses a write that every tower would make otherwise than one device makes it.

    Args:
      others: where other machines make the same step: `'servers'`, which have the variables, or
        `'copies'`, one on each worker; else None.
      has_rows_inside: whether the rows are written in a function.
    """
    reason = None
    if others == 'servers' or others and 'Scatter' in op.type:  # a count is a worker's own
        reason = 'other machines would not get the rows: train on one machine'
    elif has_rows_inside or compat.in_control_flow(op):
        reason = 'the operation is in a branch, a loop or a function: write outside of it'
    elif 'Scatter' in op.type and depends.on_any(op.inputs[1]):
        reason = ('the place of its rows is computed from a variable that the step writes, too, so '
                  'that all towers write the same rows: compute it from the examples')
    if reason is not None:
        raise SharedVariableError(
            'the model function writes variable %s by its examples (operation %s), which every '
            'tower does in its turn, and %s.' % (name, op.name, reason))


def _check_rows(op, name, recorded):
    """Refuses rows whose values follow from several examples, of which a tower has a part."""
    across = mixed(op.inputs[2], recorded.from_shard, statistics_of(recorded.operations))
    if across is not None:
        raise SharedVariableError(
            'the model function writes rows of variable %s (operation %s) by values that are '
            'computed across the examples of the batch (operation %s), of which a tower has a part '
            'alone: compute them over all towers (towers.batch_sum, towers.batch_mean), or from '
            'each example alone.' % (name, op.name, across.name))


def _is_of_every_tower(op, name, from_examples, depends, size):
    """Whether every tower has to write for the variable to get one device's value.

    That is so for rows and counts of examples; else tower 0 may write for all. (An operation of a
    type that is not known here may be a function's call, whose write cannot be looked into.)

    Args:
      from_examples: names of the operations that depend on the shard.
      size: examples in the shard; where it is static, a model that counts them adds a constant.

    Raises:
      SharedVariableError: the value comes from the examples in another way.
    """
    if op.name not in from_examples:
        return op.type in ADDS and isinstance(size, int) and size > 1 and (
            _static(op.inputs[1]) == size)
    if 'Scatter' in op.type or op.type in ADDS and op.inputs[1].dtype.is_integer:
        return True
    if op.type not in ADDS and op.type not in SETS:
        return False
    added = [op.inputs[1]]
    if op.type in SETS:
        added = _added_to_old(op.inputs[1], name) or added
    is_moving = any(depends.on(each, name) for each in added)
    if (is_moving or op.type in SETS and not depends.on(op.inputs[1], name)) and _is_affine(
            op.inputs[1], name, from_examples, depends, not is_moving, size):
        return False
    raise SharedVariableError(
        'the model function writes variable %s (operation %s) by its examples, and no moving '
        'average of them: of a part of the batch it would have another value than of the whole. '
        'Take the value over all towers (towers.batch_sum, towers.batch_mean), or compute it from '
        'what does not depend on the examples.' % (name, op.name))


def _static(tensor):
    """The scalar that a tensor is, of a constant, or of a size in a static shape; else None."""
    op = tensor.op
    if op.type in ('Identity', 'Cast'):
        return _static(op.inputs[0])
    if op.type == 'StridedSlice' and op.get_attr('shrink_axis_mask') == 1:  # tf.shape(x)[0]
        shape, begin = [tf.get_static_value(each) for each in list(op.inputs)[:2]]
        known = shape is not None and begin is not None and np.shape(shape) == (np.size(shape),)
        return shape[begin[0]] if known else None
    value = tf.get_static_value(tensor)
    return value if np.shape(value) == () else None


class _Dependence:
    """Which operations are computed from the values of which variables, in one pass."""

    def __init__(self, names, operations):
        self._bits = {name: 1 << number for number, name in enumerate(sorted(names))}
        self._found = dict(self._bits)  # name of an operation -> bits of the variables
        made, grows = {op.name for op in operations}, True
        while grows:  # again, for what comes through the back edge of a loop
            grows = False
            for op in operations:
                found = before = self._found.get(op.name, 0)
                for tensor in _counted_inputs(op):
                    if tensor.op.name not in made and tensor.op.name not in self._found:
                        self._found[tensor.op.name] = sum(
                            {self._bits.get(source.name, 0) for source in read_from(tensor)})
                    found |= self._found.get(tensor.op.name, 0)
                self._found[op.name], grows = found, grows or found != before

    def on(self, tensor, name):
        """Whether a tensor is computed from the value of a variable."""
        return bool(self._found.get(tensor.op.name, 0) & self._bits[name])

    def on_any(self, tensor):
        """Whether it is computed from the value of any of the variables."""
        return bool(self._found.get(tensor.op.name, 0))


def _counted_inputs(op):
    """The inputs that an operation reads: Keras gives its moving averages to a fused batch norm in
    training, too, which ignores them (unless `exponential_avg_factor` is set).
    """
    if not op.type.startswith('FusedBatchNorm') or not op.get_attr('is_training'):
        return op.inputs
    attributes = op.node_def.attr
    is_average = 'exponential_avg_factor' in attributes and (
        attributes['exponential_avg_factor'].f != 1.)
    return op.inputs if is_average else list(op.inputs)[:3]


def _added_to_old(tensor, name):
    """The tensors that are added to a variable's old value, or taken from it: a list; or []."""
    tensor = graph_walk.behind(tensor, ('Identity', 'Cast'))
    inputs = list(tensor.op.inputs) if tensor.op.type in SUMS else []
    others = [each for each in inputs
              if not any(source.name == name for source in read_from(each))]
    return others if len(others) < len(inputs) else []


def _is_affine(tensor, name, from_examples, depends, of_means, size):
    """Whether a tensor is a sum of the variable's value and statistics, each times a factor that
    does not depend on the examples; with `of_means` all statistics have to be means.

    A sum that is divided by the number of the examples, `size`, or by another sum, is a mean.
    """
    stack, seen = [tensor], set()
    while stack:
        tensor = stack.pop()
        op = tensor.op
        if op.name in seen or any(source.name == name for source in read_from(tensor)):
            continue
        seen.add(op.name)
        if op.name not in from_examples:
            if depends.on(tensor, name):
                stack.extend(op.inputs)
            continue
        if op.type.startswith('FusedBatchNorm') and not op.get_attr('is_training'):
            stack.append(op.inputs[tensor.value_index + 2])  # hands on the averages it is given
        elif op.type in _LINEAR:
            stack.extend(op.inputs)
        elif op.type in QUOTIENTS and not depends.on(tensor, name) and (
                op.inputs[1].op.name in from_examples or isinstance(size, int)
                and _static(op.inputs[1]) == size) and (not of_means or graph_walk.behind(
                    op.inputs[0], SAME_NUMBERS).op.type == 'Sum'):
            continue
        elif op.type in QUOTIENTS or op.type == 'Mul':
            stack.extend(each for each in op.inputs if depends.on(each, name)
                         or each.op.name in from_examples)
        elif of_means and op.type != 'Mean' and not op.type.startswith('FusedBatchNorm') or (
                depends.on(tensor, name)) or added_up(tensor, from_examples) is not None:
            return False
    return True
