"""Finds the regularization in a loss, so that N towers count it once and may compute it once.

A loss is `data + regularization`, where `regularization` is the same in every tower. Left in every
tower's loss it counts once, since the towers' weights add up to 1 (mean) or N (sum). Where it is
proven to be the same (`invariance`), it is taken out of the loss of tower 0, hence of its copies,
and computed once a step.
"""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.library import has_own_gradient
from towers.graph.op_types import PLACEHOLDERS, SUMS, VARIABLE_OPS


def split_loss(loss, varying):
    """Splits a scalar loss into the part that varies from tower to tower and the rest.

    The loss is followed backwards through operations that are linear in it (sums, differences,
    products and quotients with something that does not vary, casts), which is how models add their
    regularization: by hand, `tf.losses.get_total_loss`, `tf.add_n`, `tf.reduce_sum` of a list. Any
    other operation, and one whose gradient is overridden, stays whole.

    Args:
      loss: scalar tensor.
      varying: names of the operations that may vary, see `invariance.varying_operations`.

    Returns:
      `(data, regularization)` with `loss = data + regularization`; scalars, either may be None.
      `data` is `loss` itself when there is nothing to take out. A constant counts as data, since
      it has no gradient.
    """
    try:
        data, weights = _Split(varying).parts(loss)
    except _TooLarge:
        return loss, None
    if data is None and not _depends_on_a_variable(loss):
        return loss, None
    return data, weights


class Registered(collections.namedtuple('Registered', 'made before all_known')):
    """The losses in `REGULARIZATION_LOSSES` around a call of the model function.

    Attributes:
      made: list of the losses that the call has registered.
      before: list of the losses from before the towers.
      all_known: whether each of them is a tensor, so that it can be told what is computed from it.
    """
    __slots__ = ()

    def of_before(self, variables):
        """The losses from before the towers that regularize these variables.

        Losses of activations from before the towers belong to an earlier build, and are left out.
        """
        names = {variable.op.name for variable in variables}
        return [loss for loss in self.before if graph_walk.ancestors([loss]) & names
                and not depends_on_a_batch(loss)]

    def parts_of(self, loss, losses):
        """Which of these registered losses the loss is computed from.

        Returns:
          A list; or None where it cannot be told.
        """
        known = graph_walk.ancestors([loss])
        found = [each for each in losses if each.op.name in known]
        return found if found or self.all_known else None


class RegisteredLosses:
    """Finds the losses that calls of the model function register."""

    def __init__(self, graph):
        self._graph = graph
        self._all_known = True
        self._of_variables, self._of_weights, self._earlier = set(), set(), set()
        self._make_concrete()
        self._before = _registered()

    @contextlib.contextmanager
    def of_variable(self):
        """The context of a `get_variable`, whose loss is of every later call that finds it."""
        listed = self._graph.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
        start = len(listed)
        yield
        self._make_concrete()
        self._of_variables.update(map(id, listed[start:]))

    def of_call(self):
        """The losses that the last call has registered: `Registered`."""
        if any(loss is not None and not isinstance(loss, tf.Tensor) for loss in
               self._graph.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)):
            self._all_known = False
            self._make_concrete()
        known = set(map(id, self._before)) | self._earlier
        new = [loss for loss in _registered() if id(loss) not in known]
        # A layer registers the loss of a weight with the call that makes the weight, alone.
        again, covered = [], set().union(*map(_variables_of, new))
        for loss in _registered():
            if id(loss) in self._of_variables & self._earlier or (
                    id(loss) in self._of_weights and covered.isdisjoint(_variables_of(loss))):
                again.append(loss)
        self._of_weights.update(id(loss) for loss in new if not depends_on_a_batch(loss))
        self._earlier.update(map(id, new))
        return Registered(again + new, self._before, self._all_known)

    def _make_concrete(self):
        """Exchanges the objects that TF 2 registers for `get_variable(regularizer=)` for tensors.

        Such an object makes new operations at each use, so that it cannot be told whether a loss
        has it in it. TF 1 registers a tensor.
        """
        if tf.get_default_graph() is not self._graph:
            self._all_known = False  # within a function, whose tensors are its own
            return
        listed = self._graph.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
        for place, loss in enumerate(listed):
            if loss is not None and not isinstance(loss, tf.Tensor):
                with tf.control_dependencies(None):
                    listed[place] = tf.convert_to_tensor(loss)


def _variables_of(loss):
    """Names of the variables that a loss is computed from."""
    graph = loss.graph
    return {name for name in graph_walk.ancestors([loss])
            if graph.get_operation_by_name(name).type in VARIABLE_OPS}


def _registered():
    return [loss for loss in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
            if isinstance(loss, tf.Tensor)]


def depends_on_a_batch(loss):
    """Whether a loss is computed from examples: a placeholder or iterator that is no scalar.

    A loss that was registered before the towers may be an earlier build's, of its activations. (A
    placeholder that is a scalar may be the factor of an L2 loss.)
    """
    graph = loss.graph
    sources = [graph.get_operation_by_name(name) for name in graph_walk.ancestors([loss])]
    return any((op.type in PLACEHOLDERS or op.type == 'IteratorGetNext')
               and any(output.shape.ndims != 0 for output in op.outputs) for op in sources)


# Not `SAME_NUMBERS`: the gradient passes, too, and both parts are made by the same operation.
_PASS = frozenset(['Identity', 'Cast', 'Neg'])
_SCALE = frozenset(['Mul', 'RealDiv', 'Div'])

# A sum that is added to itself again and again has too many terms to be taken apart.
_MOST_TERMS = 20000
_DEEPEST = 50  # products of sums of products


class _TooLarge(Exception):
    """A loss has more terms than `_Split` looks at."""


class _Split:
    """Takes one loss apart."""

    def __init__(self, varying):
        self._varying = varying
        self._terms_left = _MOST_TERMS

    def parts(self, tensor, depth=0):
        """(varying part, other part) of a scalar; either may be None, their sum is the tensor."""
        if depth > _DEEPEST:
            raise _TooLarge
        data, weights = [], []  # of (part, whether it is subtracted)
        terms, waits_for = self._terms(tensor)
        for term, negative in terms:
            for part, parts in zip(self._parts_of_term(term, depth), (data, weights)):
                if part is not None:
                    parts.append((part, negative))
        if not data:
            # An addition that varies only by a control edge is left whole.
            return (tensor, None) if tensor.op.name in self._varying else (None, tensor)
        if not any(_depends_on_a_variable(part) for part, _ in weights):
            return tensor, None
        return _after(waits_for, _sum(data)), _sum(weights)

    def _terms(self, tensor):
        """The terms that a scalar is the sum of, as far as it varies.

        Not by recursion: a loss that was added up in a Python loop over the variables is as deep as
        there are variables.

        Returns:
          `(terms, waits_for)`: a list of (term, whether it is subtracted), and the control inputs
          of the additions.
        """
        terms, waits_for, stack = [], [], [(tensor, False)]
        while stack:
            self._terms_left -= 1
            if not self._terms_left:
                raise _TooLarge
            term, negative = stack.pop()
            op = term.op
            sum_op = op.inputs[0].op if op.type == 'Sum' and op.inputs[0].op.type == 'Pack' else op
            if (op.name not in self._varying or not (op.type in SUMS or sum_op is not op)
                    or has_own_gradient(op) or has_own_gradient(sum_op)
                    or any(each.shape.ndims != 0 for each in sum_op.inputs)):
                terms.append((term, negative))
                continue
            waits_for.extend(op.control_inputs)
            for position, each in reversed(list(enumerate(sum_op.inputs))):
                stack.append((each, negative != (op.type == 'Sub' and position == 1)))
        return terms, waits_for

    def _parts_of_term(self, tensor, depth):
        """As `parts`, for a tensor that is not made by an addition."""
        op = tensor.op
        if op.name not in self._varying:
            return None, tensor
        if has_own_gradient(op) or not all(each.dtype.is_floating for each in op.inputs):
            return tensor, None
        varies = [each.op.name in self._varying for each in op.inputs]
        if op.type in _PASS or (op.type in _SCALE and not varies[1]):
            return self._through(tensor, 0, depth)
        if op.type == 'Mul' and not varies[0]:
            return self._through(tensor, 1, depth)
        return tensor, None

    def _through(self, tensor, position, depth):
        """Both parts of an op that is linear in one operand: f(a + b) = f(a) + f(b)."""
        op = tensor.op
        data, weights = self.parts(op.inputs[position], depth + 1)
        if weights is None:
            return tensor, None
        if data is None:  # the operation itself waits for something that varies
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
    """The data part, waiting for the control inputs of the loss, such as assertions or updates."""
    if not waits_for:
        return part
    with tf.control_dependencies(waits_for):
        return tf.identity(part)


def _sum(parts):
    parts = [-part if negative else part for part, negative in parts]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)


def _depends_on_a_variable(tensor):
    graph = tensor.graph
    return any(graph.get_operation_by_name(name).type in VARIABLE_OPS
               for name in graph_walk.ancestors([tensor]))
