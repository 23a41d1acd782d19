"""An optimizer's own `compute_gradients` or `minimize`, which is called once, for the whole batch.

Such a method may scale the loss, add a decay of the weights, clip the gradients, draw noise, keep
the loss, or make variables. Called for each tower it would do so to a part of the gradient. So the
towers take plain gradients, and the method gets a loss S:

    value of S: the mean loss;  dS/dv: the combined gradient of v

A `compute_gradients` may change the loss before it takes gradients (by a loss scale, for half
precision): this is a factor dL/dS, by which the towers multiply their losses, before their backward
passes. There is one backward pass, and so one factor. A `minimize` gets the gradients when they are
combined and transformed, and multiplies them itself; its operation is the update.
"""

import inspect
import itertools
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.gradients.gradient_pairs import listed_pairs, tensors_of, times
from towers.graph import graph_walk
from towers.graph.op_types import SIZES
from towers.placement.variable_device import only_device

_numbers = itertools.count()  # of names in TensorFlow's registry of gradients
_OF_SHAPE = SIZES | {'ZerosLike', 'OnesLike'}
_OF_GATE = re.compile(r'tuple/control_dependency(_\d+)?$')


class OwnComputeGradients:
    """The gradients by an optimizer's own `compute_gradients`.

    Attributes:
      factor: float64 scalar, by which the towers multiply their losses: 1, or dL/dS after `pairs`.
    """

    def __init__(self, optimizer: typing.Any, variables: list, request: typing.Any):
        self._optimizer, self._variables, self._request = optimizer, variables, request
        self._called = 'compute_gradients of ' + type(optimizer).__name__
        with tf.control_dependencies(None), only_device(request.placement.main):
            # float64 holds a factor of any other type.
            self.factor = tf.constant(1., tf.float64, name='loss_factor')

    def pairs(self, loss: tf.Tensor, combined: list) -> list:
        """The pairs that the method makes of the combined gradients; `loss` is the mean over this
        machine's batch."""
        reduction = self._request.factor  # the towers' losses have it already

        def gradients(of_loss, earlier):
            self._check_single(of_loss, earlier, loss.graph)
            return [gradient for gradient, _ in combined]
        with only_device(self._request.placement.main):
            with tf.control_dependencies(None):
                surrogate, taken = _loss_with_gradients(loss, combined, gradients)
            with graph_walk.Recording(loss.graph) as made:
                pairs = computed_pairs(self._optimizer, surrogate, self._variables)
                factor = tf.cast(_first(taken, self._called), tf.float64) / reduction
            _free_of_gates(factor, {op.name for op in made.operations})
            pairs = [(None if gradient is None else times(gradient, reduction), variable)
                     for gradient, variable in pairs]
        self._check_known(factor, surrogate, combined)
        compat.replace_tensor(surrogate, loss)
        compat.replace_tensor(self.factor, factor)
        return pairs

    def _check_single(self, of_loss, earlier, graph):
        """Refuses a gradient dS in a branch, and one with another factor than `earlier` ones."""
        if of_loss.graph is not graph or compat.in_control_flow(of_loss.op):
            raise GradientError(self._called + ' takes the gradient of its loss within a branch or '
                                'a loop: take it outside.')
        numbers = [tf.get_static_value(each) for each in [of_loss] + earlier]
        if earlier and (None in numbers or len(set(map(float, numbers))) > 1):
            raise GradientError(
                self._called + ' takes gradients of its loss with several factors, by groups of '
                'variables say, and the towers have one backward pass: take them with one factor, '
                'and multiply the gradients.')

    def _check_known(self, factor, surrogate, combined):
        """Refuses a factor of the value of the loss, where that is not known in time, or here."""
        text = self._called + (' multiplies its loss by a factor that depends on the value of the '
                               'loss, which ')
        if not self._request.has_whole_batch and computes_with(
                [factor], surrogate, tensors_of(combined)):
            raise GradientError(
                text + "is of one worker's examples: let UPDATE_OPS write it to a variable, and "
                'read the variable.')
        if self._request.split.accumulate > 1 and (
                surrogate.op in graph_walk.step_operations([factor])):
            raise GradientError(text + 'is known when the last micro-batch is done: train without '
                                'accumulate= and micro_batches=.')


def computed_pairs(optimizer, loss, variables):
    """The result of an optimizer's `compute_gradients`, a list of pairs; else `GradientError`."""
    returned = optimizer.compute_gradients(loss, var_list=variables)
    pairs = listed_pairs(returned)
    if not pairs or any(isinstance(variable, (tf.Tensor, tf.IndexedSlices))
                        for _, variable in pairs):
        raise GradientError('compute_gradients of %s returned %.200r: expected a list of '
                            '(gradient, variable) pairs, one for each of its var_list.' % (
                                type(optimizer).__name__, returned))
    return pairs


def minimized(optimizer, loss, global_step, var_list):
    """The operation of an optimizer's own `minimize`, which may lack `global_step`, `var_list`."""
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


class OwnMinimize:
    """An optimizer whose `apply_gradients` calls another optimizer's own `minimize`.

    `loss` is the mean over the batch.
    """

    def __init__(self, optimizer: typing.Any, loss: tf.Tensor):
        self._optimizer, self._loss = optimizer, loss

    def apply_gradients(self, pairs: list, global_step: typing.Optional[tf.Variable] = None) -> (
            tf.Operation):
        """The operation of one step, of pairs whose gradient may be None."""
        given = [pair for pair in pairs if pair[0] is not None]
        surrogate, taken = _loss_with_gradients(
            self._loss, given, lambda of_loss, unused_taken: [
                times(gradient, of_loss) for gradient, _ in given])
        applied = minimized(self._optimizer, surrogate, global_step,
                            [variable for _, variable in pairs])
        _first(taken, 'minimize of ' + type(self._optimizer).__name__)
        compat.replace_tensor(surrogate, self._loss)
        return applied


def computes_with(tensors, loss, known):
    """Whether tensors are computed from the value of a loss, by more than its shape, and by another
    way than through `known` tensors."""
    known = {tensor.op.name for tensor in known}
    return loss.op.name in graph_walk.reached(
        [tensor.op for tensor in tensors],
        lambda op: () if op.name in known or op.type in _OF_SHAPE else [
            tensor.op for tensor in op.inputs][:1 if op.type == 'Print' else None])


def _loss_with_gradients(loss, pairs, gradients):
    """`(S, taken)`: a tensor S with the value of a loss, and other gradients for the variables.

    `gradients(dS, earlier)` returns the variables' gradients; `earlier` lists the dS of former
    calls, and `taken` the dS of all calls.
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
    """The first gradient that was taken; `GradientError` without one."""
    if not taken:
        raise GradientError(called + ' takes no gradient of the loss that it is given.')
    return taken[0]


def _free_of_gates(factor, made):
    """Frees the operations of a factor from gates: it would wait for all towers' losses."""
    for op in graph_walk.step_operations([factor]):
        if op.name in made and _OF_GATE.search(op.name):
            compat.set_control_inputs(op, [])
