"""What of a loss regularizes the weights, so that N towers count and compute it once.

A loss is `data + regularization`: `data` differs from shard to shard, `regularization` depends on
the weights alone and is the same in every tower. N towers that each carried it would compute it N
times; N towers of which only the first carries it (slim registers L2 losses only when it makes a
variable, so with the first tower) would count it wrongly in a mean. So the two are told apart in
the finished graph, and the regularization is taken from the first tower, once.
"""

import tensorflow.compat.v1 as tf

from towers import graph_walk


def split_loss(loss, data_operations):
    """Splits a scalar loss into the part that depends on data and the part that does not.

    The loss is followed backwards through operations that are linear in it (sums, differences,
    products and quotients with something that is no data, casts), which is how models add their
    regularization: by hand, `tf.losses.get_total_loss`, `tf.add_n`, `tf.reduce_sum` of a list.

    Args:
      loss: scalar tensor.
      data_operations: names of the operations that depend on the tower's shard or on chance.

    Returns:
      `(data, regularization)` with `loss = data + regularization`; scalars, either may be None.
      `data` is `loss` itself when there is nothing to take out. A constant counts as data, since
      it has no gradient.
    """
    data, weights = _split(loss, data_operations)
    if data is None and not _depends_on_a_variable(loss):
        return loss, None
    return data, weights


def registered_losses(names_of_data_operations):
    """The graph's `REGULARIZATION_LOSSES`, told apart.

    Returns:
      `(of_weights, of_data)`: lists of scalar tensors. Losses of activations are `of_data`: they
      belong to the tower whose activations they measure.
    """
    of_weights, of_data = [], []
    for loss in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES):
        if loss is None:
            continue
        (of_data if loss.op.name in names_of_data_operations else of_weights).append(loss)
    return of_weights, of_data


def losses_of_variables(losses, variables):
    """Those of the weight losses that are computed from at least one of these variables."""
    names = {variable.op.name for variable in variables}
    return [loss for loss in losses if graph_walk.ancestors([loss]) & names]


def depends_on_a_batch(loss):
    """Whether a loss is computed from examples: a placeholder or iterator that is no scalar.

    Said of a loss that was registered before the towers, perhaps by an earlier build, whose
    activations are no business of this one. (A scalar may be the factor of an L2 loss.)
    """
    graph = loss.graph
    sources = [graph.get_operation_by_name(name) for name in graph_walk.ancestors([loss])]
    return any(op.type in ('Placeholder', 'PlaceholderWithDefault', 'IteratorGetNext')
               and any(output.shape.ndims != 0 for output in op.outputs) for op in sources)


_PASS = frozenset(['Identity', 'Cast', 'Neg'])
_ADD = frozenset(['Add', 'AddV2', 'AddN', 'AccumulateNV2', 'Sub'])
_SCALE = frozenset(['Mul', 'RealDiv', 'Div'])


def _split(tensor, is_data):
    """(data part, weights part) of a scalar; either may be None, their sum is the tensor."""
    data, weights = [], []  # of (part, whether it is subtracted)
    terms, waits_for = _terms(tensor, is_data)
    for term, negative in terms:
        for part, parts in zip(_split_term(term, is_data), (data, weights)):
            if part is not None:
                parts.append((part, negative))
    if not data:
        return None, tensor
    if not any(_depends_on_a_variable(part) for part, _ in weights):
        return tensor, None
    return _after(waits_for, _sum(data)), _sum(weights)


def _terms(tensor, is_data):
    """The terms that a scalar is the sum of, as far as it depends on data.

    Not by recursion: a loss that was added up in a loop over the variables is as deep as they are
    many.

    Returns:
      `(terms, waits_for)`: a list of (term, whether it is subtracted), and what the additions have
      control dependencies on.
    """
    terms, waits_for, stack = [], [], [(tensor, False)]
    while stack:
        term, negative = stack.pop()
        op = term.op
        sum_op = op.inputs[0].op if op.type == 'Sum' and op.inputs[0].op.type == 'Pack' else op
        if (op.name not in is_data or not (op.type in _ADD or sum_op is not op)
                or any(each.shape.ndims != 0 for each in sum_op.inputs)):
            terms.append((term, negative))
            continue
        waits_for.extend(op.control_inputs)
        for position, each in reversed(list(enumerate(sum_op.inputs))):
            stack.append((each, negative != (op.type == 'Sub' and position == 1)))
    return terms, waits_for


def _split_term(tensor, is_data):
    """As `_split`, of what is no sum."""
    op = tensor.op
    if op.name not in is_data:
        return None, tensor
    if op.type in _PASS or (op.type in _SCALE and op.inputs[1].op.name not in is_data):
        return _through(op, 0, is_data, tensor)
    if op.type == 'Mul' and op.inputs[0].op.name not in is_data:
        return _through(op, 1, is_data, tensor)
    return tensor, None


def _through(op, position, is_data, tensor):
    """Both parts of an op that is linear in one operand: f(a + b) = f(a) + f(b)."""
    data, weights = _split(op.inputs[position], is_data)
    if weights is None:
        return tensor, None
    return _after(op.control_inputs, _apply(op, position, data)), _apply(op, position, weights)


def _apply(op, position, part):
    if op.type == 'Cast':
        return tf.cast(part, op.outputs[0].dtype)
    if op.type == 'Neg':
        return -part
    if op.type == 'Identity':
        return part
    other = op.inputs[1 - position]
    return part * other if op.type == 'Mul' else part / other


def _after(waits_for, part):
    """What the loss waited for, such as an assertion or an update, the data part waits for too."""
    if not waits_for:
        return part
    with tf.control_dependencies(waits_for):
        return tf.identity(part)


def _sum(parts):
    parts = [-part if negative else part for part, negative in parts]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)


def _depends_on_a_variable(tensor):
    graph = tensor.graph
    return any(graph.get_operation_by_name(name).type in ('Variable', 'VariableV2', 'VarHandleOp')
               for name in graph_walk.ancestors([tensor]))
