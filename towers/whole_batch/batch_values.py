"""Values of the whole batch inside a model function: `batch_sum`, `batch_mean`, `batch_concat`.

A tower sees its shard. A loss that divides by a count of the batch, a batch norm, negatives
from the whole batch need values of all shards. With x_k on tower k of N, w_k = n_k / n the weight
of its shard, and g_j the gradient that tower j's loss sends back:

    batch_sum     S = sum_k x_k            dx_k = sum_j g_j
    batch_mean    M = sum_k w_k x_k        dx_k = w_k sum_j g_j
    batch_concat  C = [x_0; x_1; ...]      dx_k = rows of tower k in sum_j g_j

and for a batch norm in sync, of means m_k and variances v_k over c_k numbers, with p_k = c_k / c
and g_j = (gm_j, gv_j) (Chan, Golub and LeVeque, 1983),

    batch_moments  M = sum_k p_k m_k                    dm_k = p_k sum_j (gm_j + 2 (m_k - M) gv_j)
                   V = sum_k p_k (v_k + (m_k - M)^2)    dv_k = p_k sum_j gv_j

(The towers' losses carry their weights, so the sum over j is the gradient of the batch's loss. In a
cluster k and j run over the towers of all workers, first over the towers of worker 0.)
While the model function is recorded, each call adds a placeholder that hands on the tower's own x,
and its gradient a placeholder that hands on the tower's own g. Both have a `Mark`. Once all towers
are built, `exchange` (in its own module) connects them to the values over all towers.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.op_types import (
    BATCH_VALUE,
    BATCH_VALUE_TO_BE,
    batch_value_role,
    batch_value_to_be,
)
from towers.model.build_context import Call, current_call
from towers.proof.analysis import Analysis
from towers.proof.states import Kind, State

_GRADIENT = 'TowersBatchValue'  # the name under which TensorFlow finds `_backward`

_SUFFIX_OF_GRADIENT = '_gradient'


class Mark(typing.NamedTuple):
    """What an operation is to hand on, when `exchange` has connected the towers."""
    number: int  # of the call of `batch_sum` and its like; the same in all towers
    kind: str  # of exchange: 'sum', 'mean', 'concat' or 'moments'
    is_gradient: bool  # whether it is to hand on a gradient, and else a value

    @property
    def role(self) -> str:
        """`'sum'` for a value, `'sum_gradient'` for a gradient."""
        return self.kind + _SUFFIX_OF_GRADIENT if self.is_gradient else self.kind

    def attribute(self) -> bytes:
        """The value of the attribute `BATCH_VALUE` of the operation."""
        return b'%d %s' % (self.number, self.role.encode())


def mark_of(op: tf.Operation) -> Mark:
    """The mark of an operation that has one."""
    number, role = op.get_attr(BATCH_VALUE).decode().split()
    kind, suffix, _ = role.partition(_SUFFIX_OF_GRADIENT)
    return Mark(int(number), kind, is_gradient=bool(suffix))


def is_batch_value(op: tf.Operation) -> bool:
    """Whether an operation has a mark."""
    return batch_value_role(op) is not None


# ---- the functions of the model's author ---------------------------------------------------------

def batch_sum(x: typing.Any) -> tf.Tensor:
    """The sum of a tensor over all towers of the batch; every tower gets it.

    Where there is one tower, or no build, it is the tensor itself, since the batch is whole there:
    a model runs unchanged on one device. In a finished model, which is made before its build, the
    tensor keeps a mark, by which the build makes the towers take the sum.

    Args:
      x: a dense tensor of floats or integers, of the same shape on every tower.

    Returns:
      A tensor like x.

    Raises:
      ModelFunctionError: x is in a loop, or in a function or branch of control flow v2; the parts
        of the batch are not there at the same time (`accumulate`, micro-batches, parameter
        servers); or the model function itself takes a gradient (`tf.gradients`) through the value.

    >>> total, count = tf.reduce_sum(losses * mask), tf.reduce_sum(mask)
    >>> loss = towers.batch_sum(total) / towers.batch_sum(count)
    """
    return _value(x, 'sum')


def batch_mean(x: typing.Any) -> tf.Tensor:
    """The mean of a tensor over all towers, each weighted by its number of examples.

    If x is the mean over a shard's examples, the result is the mean over the batch's examples.

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


def batch_moments(moments: tf.Tensor) -> tf.Tensor:
    """`[mean; variance; count]` of C channels over all towers, a vector [2 C + 1] of floats, so
    that one exchange does all of a batch norm. `moments` is such a vector of the shard: its mean
    and its variance are over the same numbers, which its count counts."""
    return _value(moments, 'moments')


def _value(x: typing.Any, kind: str) -> tf.Tensor:
    """What `batch_sum` and its like return: for now the tower's own x, in whose place `exchange`
    puts the value over all towers.

    Args:
      x: the tensor, or what TensorFlow makes a tensor of.
      kind: of exchange: `'sum'`, `'mean'`, `'concat'` or `'moments'`.
    """
    x = _checked_tensor(x, kind)
    graph = compat.outermost_graph(tf.get_default_graph())
    _check_is_in_graph(x, kind, graph)
    call = current_call(graph)
    if call is None:
        # No build calls a model function: the model is on one device, or is finished before its
        # build.
        return _mark_for_build(x, kind)
    _check_not_refused(x, kind, call)
    if call.num_parts == 1:  # the one tower has the whole batch
        return x
    _check_towers_can_meet(x, kind, graph)
    mark = Mark(next(call.numbers), kind, is_gradient=False)
    if kind != 'concat':
        return _marked(x, mark, x.shape)
    # The placeholder takes any number of rows as its input: the rows of the tower for now, and the
    # rows of the batch once `exchange` has connected the towers. The model function sees as many
    # rows as the batch has.
    marked = _marked(x, mark, _with_num_rows(x.shape, None))
    marked.set_shape(_with_num_rows(x.shape, _num_rows_of_batch(x, call)))
    return marked


def _with_num_rows(shape: tf.TensorShape, num_rows: typing.Optional[int]) -> tf.TensorShape:
    """The shape with another first dimension; `num_rows` is None if it is not static."""
    return tf.TensorShape([num_rows]).concatenate(shape[1:])


def _num_rows_of_batch(rows: tf.Tensor, call: Call) -> typing.Optional[int]:
    """How many rows all parts of the batch have together, where the static size of one part's rows
    tells it; else None."""
    num_rows = rows.shape.as_list()[0] if rows.shape.ndims else None
    if num_rows is None or not call.has_equal_parts:  # other parts may have more or fewer rows
        return None
    return num_rows * call.num_parts


def _checked_tensor(x: typing.Any, kind: str) -> tf.Tensor:
    """A value as a tensor; `ModelFunctionError` for one that a kind of exchange cannot take."""
    try:
        tensor = tf.convert_to_tensor(x)
    except (TypeError, ValueError):
        tensor = None
    if tensor is not None and _can_be_exchanged(tensor, kind):
        return tensor
    given = x if tensor is None else tensor
    what = 'floats' if kind == 'mean' else 'floats or integers'
    shape = ', [rows, …]' if kind == 'concat' else ''
    raise ModelFunctionError('batch_%s(%.120r): expected a dense tensor of %s%s.' % (
        kind, given, what, shape))


def _can_be_exchanged(tensor: tf.Tensor, kind: str) -> bool:
    """Whether a tensor has the dtype and the rank for a kind of exchange."""
    if kind == 'concat' and tensor.shape.ndims == 0:
        return False
    if tensor.dtype.is_integer:
        return kind != 'mean'
    return tensor.dtype.is_floating


def _check_is_in_graph(x: tf.Tensor, kind: str, graph: tf.Graph) -> None:
    """Raises `ModelFunctionError` for a tensor of another graph than the outermost one of the
    model. An eager tensor passes."""
    graph_of_x = getattr(x, 'graph', None)
    if graph_of_x is None:
        # An eager tensor: TensorFlow executes eagerly, so this is no build, and x has the whole
        # batch.
        return
    if compat.outermost_graph(graph_of_x) is not graph:
        raise ModelFunctionError('batch_%s(%s): the tensor is of another graph: expected one of '
                                 'the model that is being built.' % (kind, x.name))


def _check_not_refused(x: tf.Tensor, kind: str, call: Call) -> None:
    """Raises `ModelFunctionError` where the parts of the batch exchange no values of this kind."""
    if call.no_batch_values is not None:
        raise ModelFunctionError('batch_%s(%s): %s.' % (kind, x.name, call.no_batch_values))


def _check_towers_can_meet(x: tf.Tensor, kind: str, graph: tf.Graph) -> None:
    """Raises `ModelFunctionError` for a call or a tensor in a loop, of which one tower may run more
    iterations than another; or for a call in a function, into which a tensor of another tower
    cannot be led.

    Args:
      x: the tensor.
      kind: of exchange.
      graph: the outermost graph of the model.
    """
    is_called_in_function = graph is not tf.get_default_graph()
    is_called_in_loop = compat.builds_loop(graph)
    is_computed_in_loop = compat.in_loop(x.op)
    if is_called_in_function or is_called_in_loop or is_computed_in_loop:
        raise ModelFunctionError(
            'batch_%s(%s) is in a loop, or in a function or branch of control flow v2, where '
            'towers cannot meet: compute it outside; in a branch, tf.disable_control_flow_v2() '
            'helps.' % (kind, x.name))


# ---- marks ---------------------------------------------------------------------------------------

def _marked(x: tf.Tensor, mark: Mark, shape: tf.TensorShape) -> tf.Tensor:
    """A placeholder that hands on a tensor until `exchange` gives it another input.

    Args:
      x: the tensor.
      mark: the mark of the placeholder.
      shape: the shape of the placeholder, which the tensor and the later input both fit.
    """
    compat.register_gradient(_GRADIENT, _backward)
    with x.graph.gradient_override_map({'PlaceholderWithDefault': _GRADIENT}):
        marked = tf.placeholder_with_default(x, shape, name='batch_' + mark.role)
    compat.set_attribute(marked.op, BATCH_VALUE, tf.AttrValue(s=mark.attribute()))
    return marked


def _backward(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    """The gradient of a marked operation: a placeholder, which is marked itself."""
    mark = mark_of(op)
    x = op.inputs[0]
    # The build itself takes gradients after the call of the model function.
    is_in_model_function = current_call(op.graph) is not None
    # Gradients are added up over the towers, which is right if each tower's loss has the tower's
    # weight. Whether a gradient that the model function takes is of such a loss is not known.
    if is_in_model_function:
        raise ModelFunctionError(
            'the model function takes a gradient (tf.gradients) through batch_%s(%s), which towers '
            'add up for the loss alone: take it of values of the shard.' % (mark.kind, x.name))
    mark_of_gradient = mark._replace(is_gradient=True)
    if mark.kind != 'concat':
        return _marked(gradient, mark_of_gradient, gradient.shape)
    # `gradient` has the rows of the batch. `exchange` will put a gradient in its place that has the
    # rows of the tower.
    marked = _marked(gradient, mark_of_gradient, _with_num_rows(x.shape, None))
    marked.set_shape(x.shape)
    return marked


def _mark_for_build(x: tf.Tensor, kind: str) -> tf.Tensor:
    """Makes an identity of a tensor, with the kind of exchange as its attribute. A later build that
    gets this model as a finished one exchanges the value, see `mark_import`.

    An eager tensor, or a tensor in the graph of a function, is returned as it is: a finished model
    has no such tensor.
    """
    is_eager = not hasattr(x, 'graph')
    if is_eager or x.graph is not compat.outermost_graph(x.graph):
        return x
    marked = tf.identity(x, name='batch_' + kind)
    compat.set_attribute(marked.op, BATCH_VALUE_TO_BE, tf.AttrValue(s=kind.encode()))
    return marked


def mark_import(op: tf.Operation, node: tf.NodeDef) -> None:
    """Marks the import of an operation of a finished model, where `_mark_for_build` has noted that
    it is to hand on a value of the whole batch; leaves other operations as they are.

    Args:
      op: the operation of the finished model.
      node: the node that it is going to be imported as; changed in place.

    Raises:
      ModelFunctionError: as `batch_sum`.
    """
    kind = batch_value_to_be(op)
    if kind is None:
        return
    # Never None: the import stands in the place of the call of a model function.
    call: typing.Any = current_call(tf.get_default_graph())
    _check_not_refused(op.inputs[0], kind, call)
    if call.num_parts == 1:  # the one tower has the whole batch
        return
    if compat.in_loop(op):
        raise ModelFunctionError('batch_%s(%s) is in a loop, where towers cannot meet: compute it '
                                 'outside.' % (kind, op.inputs[0].name))
    compat.register_gradient(_GRADIENT, _backward)
    mark = Mark(next(call.numbers), kind, is_gradient=False)
    shape = op.outputs[0].shape
    if kind == 'concat':
        shape = _with_num_rows(shape, None)
    # The identity becomes the placeholder that `_marked` makes, which has the gradient `_backward`.
    # An identity has its dtype in 'T', a placeholder in 'dtype'.
    node.op = 'PlaceholderWithDefault'
    node.attr['dtype'].type = node.attr['T'].type
    node.attr['shape'].shape.CopyFrom(shape.as_proto())
    node.attr['_gradient_op_type'].s = _GRADIENT.encode()
    node.attr[BATCH_VALUE].s = mark.attribute()
    del node.attr['T'], node.attr[BATCH_VALUE_TO_BE]


# ---- what a kind of exchange is made for ---------------------------------------------------------

_INSTEAD = {
    'sum': 'take the sum over its examples first, tf.reduce_sum(x, axis)',
    'mean': 'take the mean over its examples first, tf.reduce_mean(x, axis)',
    'concat': 'it joins rows [rows, ...] of examples'}
"""{kind of exchange: what to do about a value that it is not made for}. `'moments'` is not among
them: `sync_batch_norm` exchanges moments after the check."""


def check_batch_values(operations: typing.Iterable[tf.Operation], analysis: Analysis) -> None:
    """Checks that values over all towers are taken of tensors that they are made for.

    The sum or the mean of a value of each example adds row i of one tower to row i of another;
    a tensor that is the same on every tower, or a statistic, has no rows of examples to be joined.

    Args:
      operations: the operations of the forward pass.
      analysis: the analysis of this forward pass.

    Raises:
      ModelFunctionError: a value is taken of a tensor that it is not made for.
    """
    for op in operations:
        kind = batch_value_role(op)
        # The analysis leaves out what no result of the model function needs: no step computes it.
        is_analysed = op.name in analysis.analysed
        if kind is None or not is_analysed:
            continue
        tensor = op.inputs[0]
        state = analysis.state(tensor)
        if _is_made_for(kind, state):
            continue
        given = state.kind.value  # the text about the kind, such as 'a mean over the examples'
        if state.kind in _OF_EXAMPLES:
            given += ', along axis %d' % state.axis
        raise ModelFunctionError('batch_%s(%s): the tensor is %s: %s.' % (
            kind, tensor.name, given, _INSTEAD[kind]))


_OF_EXAMPLES = (Kind.PER_EXAMPLE, Kind.ROWS)  # the examples are along an axis
_WITHOUT_ROWS = (Kind.MEAN, Kind.SUM, Kind.INDEPENDENT, Kind.SIZES)  # no axis has the examples


def _is_made_for(kind: str, state: State) -> bool:
    """Whether a kind of exchange is made for a tensor in a state. A tensor of which nothing is
    proven passes: its author may know."""
    has_examples_along_axis = state.kind in _OF_EXAMPLES
    if kind != 'concat':
        # A sum or a mean of values of single examples would add up different examples, one of each
        # tower.
        return not has_examples_along_axis
    if has_examples_along_axis:
        return state.axis == 0  # rows are joined along the first dimension
    return state.kind not in _WITHOUT_ROWS
