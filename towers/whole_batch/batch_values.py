"""Values of the whole batch inside a model function: `batch_sum`, `batch_mean`, `batch_concat`.

A tower sees its shard. A loss that divides by a count of the batch, a batch norm, negatives
from the whole batch need values of all shards. With x_k on tower k of N, w_k = n_k / n its part of
the batch's examples, and g_j the gradient that tower j's loss sends back:

    batch_sum     S = sum_k x_k            dx_k = sum_j g_j
    batch_mean    M = sum_k w_k x_k        dx_k = w_k sum_j g_j
    batch_concat  C = [x_0; x_1; ...]      dx_k = rows of tower k in sum_j g_j

(The towers' losses carry their weights, so the sum over j is the gradient of the batch's loss.)
While the model function is recorded, each call adds a placeholder that passes on the tower's own x,
and its gradient a placeholder that passes on the tower's own g. Once all towers are built,
`exchange` connects them to the values over all towers.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.op_types import (
    BATCH_VALUE,
    BATCH_VALUE_TO_BE,
    batch_value_kind,
    batch_value_to_be,
)
from towers.model.build_context import current_call
from towers.placement.variable_device import only_device
from towers.proof.states import Kind
from towers.shards.cut_batch import weighted, zero_if_empty

_GRADIENT = 'TowersBatchValue'


def batch_sum(x: typing.Any) -> tf.Tensor:
    """The sum of a tensor over all towers of the batch; every tower gets it.

    Where there is one tower, or no build, it is the tensor itself, since the batch is whole there:
    a model runs unchanged on one device. A program that is built before its `build_towers` keeps a
    mark with it, by which the towers of its finished model take the sum.

    Args:
      x: a dense tensor of floats or integers, of the same shape on every tower.

    Returns:
      A tensor like x.

    Raises:
      ModelFunctionError: x is in a loop, or in a function or branch of control flow v2; the parts
        of the batch are not there at the same time (`accumulate`, micro-batches, machines); or the
        model function itself takes a gradient (`tf.gradients`) through the value.

    >>> total, count = tf.reduce_sum(losses * mask), tf.reduce_sum(mask)
    >>> loss = towers.batch_sum(total) / towers.batch_sum(count)
    """
    return _value(x, 'sum')


def batch_mean(x: typing.Any) -> tf.Tensor:
    """The mean of a tensor over all towers, each weighted by its number of examples.

    Of a mean over a shard's examples it is the mean over the batch's.

    Args:
      x: a dense tensor of floats, of the same shape on every tower.

    Returns, raises: as `batch_sum`.
    """
    return _value(x, 'mean')


def batch_concat(x: typing.Any) -> tf.Tensor:
    """The rows of a tensor from all towers, in the order of the batch.

    Args:
      x: a dense tensor [rows, …] of floats or integers.

    Returns:
      A tensor [rows of all towers, …].

    Raises:
      ModelFunctionError: as `batch_sum`; or x is a scalar.
    """
    return _value(x, 'concat')


def _value(x, kind):
    try:
        x = tf.convert_to_tensor(x)
        allowed = (x.dtype.is_floating or x.dtype.is_integer and kind != 'mean') and (
            kind != 'concat' or x.shape.ndims != 0)
    except (TypeError, ValueError):
        allowed = False
    if not allowed:
        raise ModelFunctionError('batch_%s(%.120r): expected a dense tensor of %s%s.' % (
            kind, x, 'floats' if kind == 'mean' else 'floats or integers',
            ', [rows, …]' if kind == 'concat' else ''))
    graph = compat.outermost_graph(tf.get_default_graph())
    graph_of_x = getattr(x, 'graph', None)  # None of an eager tensor
    if graph_of_x is not None and compat.outermost_graph(graph_of_x) is not graph:
        raise ModelFunctionError('batch_%s(%s): the tensor is of another graph: expected one of '
                                 'the model that is being built.' % (kind, x.name))
    call = current_call(graph)
    if call is None:
        return _to_be(x, kind)
    _check_not_refused(x, kind, call)
    if call.num_parts == 1:
        return x
    if graph is not tf.get_default_graph() or not compat.in_branches_alone(x.op) or (
            compat.builds_loop(graph)):
        raise ModelFunctionError(
            'batch_%s(%s) is in a loop, or in a function or branch of control flow v2, where '
            'towers cannot meet: compute it outside; in a branch, tf.disable_control_flow_v2() '
            'helps.' % (kind, x.name))
    number = next(call.numbers)
    if kind != 'concat':
        return _mark(x, x.shape, number, kind)
    rows, others = x.shape.as_list()[0] if x.shape.ndims else None, x.shape[1:]
    return _mark(x, tf.TensorShape([None]).concatenate(others), number, kind, tf.TensorShape(
        [rows and rows * call.num_parts]).concatenate(others))  # the static size is every tower's


def _check_not_refused(x, kind, call):
    if call.no_batch_values is not None:
        raise ModelFunctionError('batch_%s(%s): %s.' % (kind, x.name, call.no_batch_values))


def _to_be(x, kind):
    """The tensor itself, with a mark for the build of the finished model that it is in. Of an eager
    tensor, or in the graph of a function, nothing is kept."""
    if not hasattr(x, 'graph') or x.graph is not compat.outermost_graph(x.graph):
        return x
    marked = tf.identity(x, name='batch_' + kind)
    compat.set_attribute(marked.op, BATCH_VALUE_TO_BE, tf.AttrValue(s=kind.encode()))
    return marked


def mark_import(op: tf.Operation, node: tf.NodeDef) -> None:
    """Makes `node`, of the import of an operation of a finished model, hand on a value of the whole
    batch, where the program has asked for one.

    Raises:
      ModelFunctionError: as `batch_sum`.
    """
    kind = batch_value_to_be(op)
    call = current_call(tf.get_default_graph())
    if kind is None:
        return
    _check_not_refused(op.inputs[0], kind, call)
    if call.num_parts == 1:
        return
    if not compat.in_branches_alone(op):
        raise ModelFunctionError('batch_%s(%s) is in a loop, where towers cannot meet: compute it '
                                 'outside.' % (kind, op.inputs[0].name))
    compat.register_gradient(_GRADIENT, _backward)
    shape = op.outputs[0].shape
    if kind == 'concat':
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    node.op = 'PlaceholderWithDefault'
    node.attr['dtype'].type = node.attr['T'].type
    node.attr['shape'].shape.CopyFrom(shape.as_proto())
    node.attr['_gradient_op_type'].s = _GRADIENT.encode()
    node.attr[BATCH_VALUE].s = b'%d %s' % (next(call.numbers), kind.encode())
    del node.attr['T'], node.attr[BATCH_VALUE_TO_BE]


def _mark(x, shape, number, role, known_shape=None):
    """A placeholder of this shape that passes on a tensor until `exchange` gives it another input,
    of the `known_shape`."""
    compat.register_gradient(_GRADIENT, _backward)
    with x.graph.gradient_override_map({'PlaceholderWithDefault': _GRADIENT}):
        marked = tf.placeholder_with_default(x, shape, name='batch_' + role)
    compat.set_attribute(marked.op, BATCH_VALUE, tf.AttrValue(s=b'%d %s' % (number, role.encode())))
    if known_shape is not None:
        marked.set_shape(known_shape)
    return marked


def _backward(op, gradient):
    (number, kind), x = _mark_of(op), op.inputs[0]
    if current_call(op.graph) is not None:  # its loss is not known to carry the tower's weight
        raise ModelFunctionError(
            'the model function takes a gradient (tf.gradients) through batch_%s(%s), which towers '
            'add up for the loss alone: take it of values of the shard.' % (kind, x.name))
    if kind != 'concat':
        return _mark(gradient, gradient.shape, number, kind + '_gradient')
    return _mark(gradient, tf.TensorShape([None]).concatenate(x.shape[1:]), number,
                 'concat_gradient', x.shape)


def is_batch_value(op):
    """Whether an operation hands on a value of the whole batch."""
    return batch_value_kind(op) is not None


_INSTEAD = {
    'sum': 'take the sum over its examples first, tf.reduce_sum(x, axis)',
    'mean': 'take the mean over its examples first, tf.reduce_mean(x, axis)',
    'concat': 'it joins rows [rows, ...] of examples'}


def check_batch_values(operations, analysis):
    """Raises `ModelFunctionError` for values over all towers of a tensor that it is not made for.

    The sum or the mean of a value of each example adds row i of one tower to row i of another;
    what is the same on every tower, or a statistic, has no rows of examples to be joined.
    """
    for op in operations:
        kind = batch_value_kind(op)
        if kind is None or op.name not in analysis.analysed:
            continue
        state = analysis.state(op.inputs[0])
        is_of_examples = state.kind in (Kind.PER_EXAMPLE, Kind.ROWS)
        is_wrong = is_of_examples if kind != 'concat' else (
            state.kind in (Kind.MEAN, Kind.SUM, Kind.INDEPENDENT, Kind.SIZES)
            or is_of_examples and state.axis != 0)
        if is_wrong:
            given = state.kind.value
            if is_of_examples:
                given += ', along axis %d' % state.axis
            raise ModelFunctionError('batch_%s(%s): the tensor is %s: %s.' % (
                kind, op.inputs[0].name, given, _INSTEAD[kind]))


def _mark_of(op):
    number, role = op.get_attr(BATCH_VALUE).decode().split()
    return int(number), role


def exchange(towers, weights, device):
    """Gives all marked operations their values: sums, means and rows over all towers, made on
    `device`. `weights` are the towers' parts of the batch's examples."""
    marks = [collections.defaultdict(list) for _ in towers]
    for op in tf.get_default_graph().get_operations():
        if is_batch_value(op):
            for tower, found in zip(towers, marks):
                if tower.has(op.name):
                    found[_mark_of(op)].append(op)
    for tower, found in zip(towers, marks):
        for ops in found.values():  # an import changes the order of operations
            ops.sort(key=lambda op: (len(op.name), op.name))
        if {key: len(ops) for key, ops in found.items()} != {
                key: len(ops) for key, ops in marks[0].items()}:
            raise ModelFunctionError(
                'tower %d asks for other values of the whole batch than tower 0 (batch_sum, '
                'batch_mean, batch_concat): ask for the same ones in every call of the model '
                'function.' % tower.index)
    if not marks[0]:
        return
    with tf.control_dependencies(None), tf.name_scope('batch_values'), only_device(device):
        rows = {number: tf.stack([tf.shape(found[number, role][0].inputs[0])[0] for found in marks])
                for number, role in sorted(marks[0]) if role == 'concat'}
        for (number, role), ops in sorted(marks[0].items()):
            for place in range(len(ops)):
                of_towers = [found[number, role][place] for found in marks]
                values = _exchanged(role, [op.inputs[0] for op in of_towers], weights,
                                    rows.get(number))
                for op, value in zip(of_towers, values):
                    compat.replace_input(op, 0, value)


def _exchanged(role, values, weights, rows):
    """The values that the towers get: a list; `rows` [N]: how many each adds to a `'concat'`."""
    if role == 'concat':
        with tf.control_dependencies(_has_examples(weights)):
            return [_of_any_size(tf.concat(values, 0))] * len(values)
    if role in ('sum', 'mean'):
        counted = weighted if role == 'mean' else zero_if_empty
        return [tf.add_n(list(map(counted, values, weights)))] * len(values)
    total = tf.add_n(values)
    if role == 'concat_gradient':
        return list(map(_of_any_size, tf.split(total, rows)))
    counted = weighted if role == 'mean_gradient' else zero_if_empty
    return [counted(total, weight) for weight in weights]


def _of_any_size(rows):
    """Rows of no static number, which can take the place of any other number of rows."""
    return tf.placeholder_with_default(rows, tf.TensorShape([None]).concatenate(rows.shape[1:]))


def _has_examples(weights):
    """Assertions that all towers have examples, where that is not static: a list."""
    if any(isinstance(weight, float) and not weight for weight in weights):
        raise ModelFunctionError('batch_concat, and the batch has fewer examples than there are '
                                 'towers: pass a larger batch, or fewer devices.')
    return [tf.Assert(weight > 0., ['towers: batch_concat needs an example for each tower'])
            for weight in weights if isinstance(weight, tf.Tensor)]
