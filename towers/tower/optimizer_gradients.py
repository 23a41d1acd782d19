"""Optimizers with a `compute_gradients` or `minimize` of their own: called once, for the batch.

Such a method may scale the loss, add a decay of the weights, clip the gradients, draw noise, keep
the loss, or make variables. Called for each tower it would do so to a part of the gradient. So the
towers take plain gradients, and the method gets a loss S in their place:

    value of S: the mean loss;  dS/dv: the combined gradient of v

What a `compute_gradients` makes of the loss before it takes gradients (a loss scale, for half
precision) is a factor dL/dS, by which the towers multiply their losses, before their backward
passes. There is one backward pass, and so one factor. A `minimize` gets the gradients when they are
combined and transformed, and multiplies them itself; its operation is the update.
"""

import inspect
import itertools
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.op_types import SIZES
from towers.placement.variable_device import only_device
from towers.tower.objectives import GradientsOfModel, tensors_of

_numbers = itertools.count()  # of names in TensorFlow's registry of gradients
_OF_GATE = re.compile(r'tuple/control_dependency(_\d+)?$')
_OF_SHAPE = SIZES | {'ZerosLike', 'OnesLike'}


def has_own(optimizer):
    """Whether the towers get their gradients by an optimizer's own `compute_gradients`."""
    if isinstance(optimizer, GradientsOfModel) or has_own_minimize(optimizer):
        return False  # the model function's own, in each call; or `minimize` calls it
    return getattr(optimizer.compute_gradients, '__func__',
                   None) is not tf.train.Optimizer.compute_gradients


def own_pairs(objective, loss, combined, variables, factor, request):
    """What an optimizer's own `compute_gradients` makes of the combined gradients.

    Args:
      objective: `Objective`.
      loss: the mean loss over the batch (of this machine).
      combined: list of `(gradient, variable)`.
      variables: list of the variables that the objective trains.
      factor: the constant by which the towers multiply their losses; dL/dS takes its place.
      request: `Request`.

    Returns:
      List of `(gradient, variable)`.

    Raises:
      GradientError: the method does not return pairs; takes no gradient of its loss, or takes it in
        a branch, or with several factors; or the factor depends on the value of the loss of one of
        several machines, or, before the last micro-batch, of all of them.
    """
    called = 'compute_gradients of ' + type(objective.optimizer).__name__
    reduction = request.factor  # the towers' losses have it already

    def checked(of_loss, factors):
        if of_loss.graph is not loss.graph or compat.in_control_flow(of_loss.op):
            raise GradientError(called + ' takes the gradient of its loss within a branch or a '
                                'loop: take it outside.')
        numbers = [tf.get_static_value(each) for each in [of_loss] + factors]
        if factors and (None in numbers or len(set(map(float, numbers))) > 1):
            raise GradientError(
                called + ' takes gradients of its loss with several factors, by groups of '
                'variables say, and the towers have one backward pass: take them with one factor, '
                'and multiply the gradients.')
        return [gradient for gradient, _ in combined]
    with only_device(request.placement.main):
        with tf.control_dependencies(None):
            surrogate, factors = _loss_with_gradients(loss, combined, checked)
        with graph_walk.Recording(loss.graph) as made:
            pairs = computed(objective.optimizer, surrogate, variables)
            found = tf.cast(_first(factors, called), tf.float64)
            found = found if reduction == 1 else found / reduction
        _free_of_gates(found, {op.name for op in made.operations})
        pairs = [(gradient if reduction == 1 or gradient is None else times(gradient, reduction),
                  variable) for gradient, variable in pairs]
    if not request.has_whole_batch and computes_with([found], surrogate, combined):
        raise GradientError(
            "%s multiplies its loss by what depends on the value of the loss, which is of one "
            "worker's examples: let UPDATE_OPS write it to a variable, and read the variable."
            % called)
    if request.accumulate > 1 and surrogate.op in graph_walk.step_operations([found]):
        raise GradientError(
            '%s multiplies its loss by what depends on the value of the loss, which is known when '
            'the last micro-batch is done: train without accumulate= and micro_batches=.' % called)
    compat.replace_tensor(surrogate, loss)
    compat.replace_tensor(factor, found)
    return pairs


def _loss_with_gradients(loss, pairs, gradients):
    """`(S, taken)`: a tensor S with the value of a loss, and other gradients.

    Args:
      loss: scalar.
      pairs: list of `(gradient, variable)`.
      gradients: function from a gradient of S, and the list of those that were taken before, to
        those of the variables of the pairs. The latter list is `taken`.
    """
    name, taken = 'TowersWholeLoss%d' % next(_numbers), []

    def backward(unused_op, of_loss, *unused_rest):
        of_variables = gradients(of_loss, list(taken))
        taken.append(of_loss)
        return [None] + of_variables
    tf.RegisterGradient(name)(backward)
    with tf.name_scope('whole_loss'):
        reads = [variable.read_value() for _, variable in pairs]
        with loss.graph.gradient_override_map({'IdentityN': name}):
            return tf.identity_n([loss] + reads)[0], taken


def _first(taken, called):
    if not taken:
        raise GradientError(called + ' takes no gradient of the loss that it is given.')
    return taken[0]


def computed(optimizer, loss, variables):
    """What an optimizer's `compute_gradients` returns, as a list of pairs.

    Raises:
      GradientError: it returned something else, or none.
    """
    returned = optimizer.compute_gradients(loss, var_list=variables)
    pairs = listed_pairs(returned)
    if not pairs or any(isinstance(variable, (tf.Tensor, tf.IndexedSlices))
                        for _, variable in pairs):
        raise GradientError('compute_gradients of %s returned %.200r: expected a list of '
                            '(gradient, variable) pairs, one for each of its var_list.' % (
                                type(optimizer).__name__, returned))
    return pairs


def listed_pairs(pairs):
    """An iterable of pairs, such as a `zip`, as a list of tuples; None for anything else."""
    if isinstance(pairs, (str, bytes, dict, tf.Tensor)):
        return None
    try:
        listed = list(pairs)
    except TypeError:
        return None
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in listed):
        return None
    return [tuple(pair) for pair in listed]


def _free_of_gates(factor, made):
    """Frees what a factor is computed by from gates, by which it would wait for all towers' losses.

    Where gradients are gated, TensorFlow has the gradient of one input wait for that of another.
    """
    for op in graph_walk.step_operations([factor]):
        if op.name in made and _OF_GATE.search(op.name):
            compat.set_control_inputs(op, [])


def times(gradient, factor):
    """A gradient, dense or sparse, times a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices,
                                gradient.dense_shape)
    if isinstance(factor, tf.Tensor):
        factor = tf.cast(factor, gradient.dtype)
    return gradient * factor


def computes_with(gradients, surrogate, combined):
    """Whether gradients depend on the value of the surrogate, and not on its shape alone."""
    stack = [tensor.op for tensor in tensors_of([(each, None) for each in gradients])]
    seen = {tensor.op.name for tensor in tensors_of(combined)}
    while stack:
        op = stack.pop()
        if op is surrogate.op:
            return True
        if op.name not in seen and op.type not in _OF_SHAPE:
            stack += [tensor.op for tensor in op.inputs][:1 if op.type == 'Print' else None]
        seen.add(op.name)
    return False


def has_own_minimize(optimizer):
    """Whether an optimizer's `minimize` is none of TensorFlow's.

    Besides that of `tf.train.Optimizer` there are some in `tf.contrib.opt`, which take one more
    argument, and do nothing besides.
    """
    if isinstance(optimizer, GradientsOfModel):
        return False
    method = getattr(optimizer, 'minimize', None)
    function = getattr(method, '__func__', method)
    if function is None or function is tf.train.Optimizer.minimize:
        return False
    # Where its code is: `functools.wraps` gives a function the module of another.
    module = getattr(function, '__globals__', {}).get('__name__', '')
    return module.split('.')[0] not in ('tensorflow', 'tensorflow_core')


def minimized(optimizer, loss, global_step, var_list):
    """What an optimizer's own `minimize` returns; it may be without `global_step` and `var_list`.

    Raises:
      GradientError: it needs another argument, or returns no operation.
    """
    called = 'minimize of ' + type(optimizer).__name__
    arguments = dict(global_step=global_step, var_list=var_list)
    signature = inspect.signature(optimizer.minimize)
    if not any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        arguments = {name: value for name, value in arguments.items()
                     if name in signature.parameters}
    try:
        signature.bind(loss, **arguments)
    except TypeError as error:
        raise GradientError('%s: expected minimize(loss, global_step=None, var_list=None): %s.'
                            % (called, error)) from None
    applied = optimizer.minimize(loss, **arguments)
    if not isinstance(applied, (tf.Operation, tf.Tensor) + compat.VARIABLE_TYPES):
        raise GradientError('%s returned %.80r: expected the operation that updates the variables.'
                            % (called, applied))
    return applied


class Minimizing:
    """Has `apply_gradients`, as an optimizer, which calls the optimizer's own `minimize`."""

    def __init__(self, optimizer, loss):
        self._optimizer, self._loss = optimizer, loss  # the mean loss over the batch

    def apply_gradients(self, pairs, global_step=None):
        """The operation of one step, of pairs whose gradient may be None.

        Raises:
          GradientError: the method takes no gradient of its loss.
        """
        given = [pair for pair in pairs if pair[0] is not None]
        surrogate, taken = _loss_with_gradients(
            self._loss, given, lambda of_loss, unused_taken: [
                times(gradient, of_loss) for gradient, _ in given])
        applied = minimized(self._optimizer, surrogate, global_step,
                            [variable for _, variable in pairs])
        _first(taken, 'minimize of ' + type(self._optimizer).__name__)
        compat.replace_tensor(surrogate, self._loss)
        return applied
