"""An optimizer's own `compute_gradients` or `minimize`, which is called once, for the whole batch.

Such a method may scale the loss, add a decay of the weights, clip the gradients, draw noise, keep
the loss, or make variables. Called for each tower it would do so to a part of the gradient. So the
towers take plain gradients, and the method gets a loss S:

    value of S: the mean loss;  dS/dv: the combined gradient of v

A `compute_gradients` may change the loss before it takes gradients (by a loss scale, for half
precision): this is a factor dL/dS, by which the towers multiply their losses, before their backward
passes. There is one backward pass, and so one factor. A `minimize` gets the gradients when they are
combined and transformed, and multiplies them itself; its operation is the update.

Its tests are `tests/gradients/test_optimizer_gradients.py` and `test_optimizer_minimize.py`.
"""

import inspect
import itertools
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.gradients.gradient_pairs import (
    Pairs,
    gradients_of,
    listed_pairs,
    tensors_of,
    times,
    variables_of,
)
from towers.graph import graph_walk
from towers.graph.op_types import SIZES
from towers.model.request import Request
from towers.placement.variable_device import only_device

_numbers = itertools.count()  # each gradient function needs a name of its own in TensorFlow
_OF_SHAPE = SIZES | {'ZerosLike', 'OnesLike'}  # which need nothing but the shape of an input
_WAITS_FOR_ALL_GRADIENTS = re.compile(r'tuple/control_dependency(_\d+)?$')
"""Names of the operations by which a gradient waits for the gradients of its neighbours."""


class OwnComputeGradients:
    """The gradients by an optimizer's own `compute_gradients`.

    Attributes:
      factor: float64 scalar, by which the towers multiply their losses. It is a constant 1 until
        `pairs` makes all that takes it take dL/dS.
    """

    def __init__(self, optimizer: typing.Any, variables: list, request: Request):
        """
        Args:
          optimizer: the optimizer.
          variables: the variables that it trains.
          request: `Request` of the build.
        """
        self._optimizer = optimizer
        self._variables = variables
        self._request = request
        self._called = 'compute_gradients of ' + type(optimizer).__name__
        # The towers' losses depend on the factor, so that it may wait for nothing else.
        with tf.control_dependencies(None), only_device(request.placement.main):
            # float64 holds a factor of any other type.
            self.factor = tf.constant(1., tf.float64, name='loss_factor')

    def pairs(self, loss: tf.Tensor, combined: list) -> list:
        """Calls the method, and returns the `(gradient, variable)` pairs that it makes.

        Args:
          loss: the mean loss over this machine's batch.
          combined: the combined gradients, as pairs.
        """
        # 1 for a mean, the number of towers for a sum. The combined gradients have this factor, so
        # that `self.factor` divides the towers' losses by it: the method gets gradients of the mean
        # loss, to which it may add a decay of the weights. Its pairs are multiplied at the end.
        reduction = self._request.factor

        def combined_gradients(d_surrogate: tf.Tensor, earlier: list) -> list:
            """The gradients of S. They are not multiplied by dS, as the towers' losses are."""
            self._check_single(d_surrogate, earlier, loss.graph)
            return gradients_of(combined)

        with only_device(self._request.placement.main):
            with tf.control_dependencies(None):  # the factor is computed from S
                surrogate = _Surrogate(loss, combined, combined_gradients)
            with graph_walk.Recording(loss.graph) as made:
                pairs = computed_pairs(self._optimizer, surrogate.loss, self._variables)
                d_surrogate = surrogate.first_gradient(self._called)
                factor = tf.cast(d_surrogate, tf.float64) / reduction
            _remove_waits_for_gradients(factor, graph_walk.names_of(made.operations))
            pairs = _multiplied(pairs, reduction)
        self._check_known(factor, surrogate.loss, combined)
        compat.replace_tensor(surrogate.loss, loss)
        compat.replace_tensor(self.factor, factor)
        return pairs

    def _check_single(self, d_surrogate: tf.Tensor, earlier: list, graph: tf.Graph) -> None:
        """Refuses a method that takes the gradient of its loss in a branch, or with several
        factors.

        Args:
          d_surrogate: the gradient dS that is taken now.
          earlier: the gradients dS that the method has taken before.
          graph: the graph of the loss.
        """
        if d_surrogate.graph is not graph or compat.in_control_flow(d_surrogate.op):
            raise GradientError(self._called + ' takes the gradient of its loss within a branch or '
                                'a loop: take it outside.')
        if not earlier:
            return
        factors = [tf.get_static_value(each) for each in [d_surrogate] + earlier]
        is_proven_equal = None not in factors and len(set(map(float, factors))) == 1
        if not is_proven_equal:
            raise GradientError(
                self._called + ' takes gradients of its loss with several factors, by groups of '
                'variables say, and the towers have one backward pass: take them with one factor, '
                'and multiply the gradients.')

    def _check_known(self, factor: tf.Tensor, surrogate: tf.Tensor, combined: list) -> None:
        """Refuses a factor that is computed from the value of the loss, on several machines, where
        the value is one worker's, and with micro-batches, where it is known too late.

        Args:
          factor: the factor by which the towers multiply their losses.
          surrogate: the loss that the method got.
          combined: the combined gradients, as pairs.
        """
        text = self._called + (' multiplies its loss by a factor that depends on the value of the '
                               'loss, which ')
        is_on_several_machines = not self._request.has_whole_batch
        if is_on_several_machines and computes_with([factor], surrogate, tensors_of(combined)):
            raise GradientError(
                text + "is of one worker's examples: let UPDATE_OPS write it to a variable, and "
                'read the variable.')
        has_micro_batches = self._request.split.accumulate > 1
        if has_micro_batches and surrogate.op in graph_walk.step_operations([factor]):
            raise GradientError(text + 'is known when the last micro-batch is done: train without '
                                'accumulate= and micro_batches=.')


def _multiplied(pairs: Pairs, factor: float) -> typing.List[tuple]:
    """List of the pairs with their gradients times a factor; None stays None."""
    result = []
    for gradient, variable in pairs:
        if gradient is not None:
            gradient = times(gradient, factor)
        result.append((gradient, variable))
    return result


def computed_pairs(optimizer: typing.Any, loss: tf.Tensor, variables: list) -> typing.List[tuple]:
    """List of the `(gradient, variable)` pairs that an optimizer's `compute_gradients` returns.

    Args:
      optimizer: the optimizer.
      loss: the loss to differentiate.
      variables: the variables to differentiate it by.

    Raises:
      GradientError: it returned something else.
    """
    returned = optimizer.compute_gradients(loss, var_list=variables)
    pairs = listed_pairs(returned)
    if not pairs or not _have_variables(pairs):
        raise GradientError('compute_gradients of %s returned %.200r: expected a list of '
                            '(gradient, variable) pairs, one for each of its var_list.' % (
                                type(optimizer).__name__, returned))
    return pairs


def _have_variables(pairs: Pairs) -> bool:
    """Whether the second of each pair may be a variable: it is no tensor, as it would be in pairs
    in the wrong order."""
    return not any(isinstance(variable, (tf.Tensor, tf.IndexedSlices)) for _, variable in pairs)


def minimized(optimizer: typing.Any, loss: tf.Tensor,
              global_step: typing.Optional[tf.Variable], var_list: list) -> tf.Operation:
    """Calls an optimizer's own `minimize`, and returns the operation of the update.

    Args:
      optimizer: the optimizer. Its method may lack the arguments `global_step` and `var_list`.
      loss: the loss.
      global_step: the variable that counts steps; or None.
      var_list: the variables to train.

    Raises:
      GradientError: the method takes other arguments, or returns no operation.
    """
    called = 'minimize of ' + type(optimizer).__name__
    arguments = dict(global_step=global_step, var_list=var_list)
    signature = inspect.signature(optimizer.minimize)
    parameters = signature.parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    if not takes_any_name:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
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
    """An optimizer whose `apply_gradients` calls another optimizer's own `minimize`."""

    def __init__(self, optimizer: typing.Any, loss: tf.Tensor):
        """
        Args:
          optimizer: the other optimizer.
          loss: the mean loss over the batch.
        """
        self._optimizer = optimizer
        self._loss = loss

    def apply_gradients(self, pairs: list, global_step: typing.Optional[tf.Variable] = None) -> (
            tf.Operation):
        """Makes the operation of one step by calling `minimize`, which gets a loss whose gradients
        are those of the pairs.

        Args:
          pairs: list of `(gradient, variable)`; the gradient may be None.
          global_step: the variable that counts steps; or None.
        """
        present = [pair for pair in pairs if pair[0] is not None]

        def given_gradients(d_surrogate: tf.Tensor, unused_earlier: list) -> list:
            """The gradients of S times dS, by the chain rule."""
            return [times(gradient, d_surrogate) for gradient, _ in present]

        surrogate = _Surrogate(self._loss, present, given_gradients)
        applied = minimized(self._optimizer, surrogate.loss, global_step, variables_of(pairs))
        surrogate.first_gradient('minimize of ' + type(self._optimizer).__name__)
        compat.replace_tensor(surrogate.loss, self._loss)
        return applied


def computes_with(tensors: typing.Iterable[tf.Tensor], loss: tf.Tensor,
                  known: typing.Iterable[tf.Tensor]) -> bool:
    """Whether tensors are computed from the value of a loss.

    Args:
      tensors: the tensors.
      loss: the loss; what needs only its shape does not count.
      known: tensors that may be computed from the loss: the search ends at them.
    """
    known_names = graph_walk.operation_names(known)

    def computed_from(op: tf.Operation) -> list:
        """The operations whose values get into the results of `op`."""
        if op.name in known_names or op.type in _OF_SHAPE:
            return []
        producers = graph_walk.producers_of(op)
        if op.type == 'Print':
            return producers[:1]  # the others are only printed
        return producers
    operations = map(graph_walk.operation_of, tensors)
    return loss.op.name in graph_walk.reached(operations, computed_from)


class _Surrogate:
    """The loss S that an optimizer's own method gets: the value of a loss, with other gradients.

    Attributes:
      loss: S, a tensor.
    """

    def __init__(self, loss: tf.Tensor, pairs: Pairs, gradients: typing.Callable):
        """
        Args:
          loss: the tensor whose value S has.
          pairs: the variables v that S has gradients to, as `(gradient, variable)` pairs.
          gradients: function `(dS, earlier) -> [dv]`, where `earlier` lists the dS of former calls.
        """
        self._d_surrogates: typing.List[tf.Tensor] = []  # dS of each call so far
        gradient_type = 'TowersWholeLoss%d' % next(_numbers)

        def backward(unused_op: tf.Operation, d_surrogate: tf.Tensor, *unused_rest: typing.Any):
            """The gradients of the identity below: none of the loss, `gradients` of the variables.
            """
            d_variables = gradients(d_surrogate, list(self._d_surrogates))
            self._d_surrogates.append(d_surrogate)
            return [None] + d_variables

        # An identity of the loss and the variables is computed from all of these, so that
        # `tf.gradients` of its first output by a variable calls `backward`.
        tf.RegisterGradient(gradient_type)(backward)
        with tf.name_scope('whole_loss'):
            values = [variable.read_value() for _, variable in pairs]
            with loss.graph.gradient_override_map({'IdentityN': gradient_type}):
                self.loss = tf.identity_n([loss] + values)[0]

    def first_gradient(self, called: str) -> tf.Tensor:
        """The first dS that a method has taken.

        Args:
          called: names the method, for the error.

        Raises:
          GradientError: the method has taken no gradient.
        """
        if not self._d_surrogates:
            raise GradientError(called + ' takes no gradient of the loss that it is given.')
        return self._d_surrogates[0]


def _remove_waits_for_gradients(factor: tf.Tensor, made: typing.Set[str]) -> None:
    """Makes a factor wait for nothing but its inputs.

    As optimizers call it, `tf.gradients` makes each gradient of an operation wait for the
    operation's other gradients. Of a scaled loss, c S, these are dS = c d and dc = S d, where d is
    the gradient of the product: dS, and so the factor, would wait for the value of S, which is that
    of the loss of all towers. With micro-batches that closes a circle: the last one's loss waits
    for the backward pass of the one before, whose loss is multiplied by the factor.

    Args:
      factor: the factor.
      made: names of the operations that may be changed.
    """
    for op in graph_walk.step_operations([factor]):
        if op.name in made and _WAITS_FOR_ALL_GRADIENTS.search(op.name):
            compat.set_control_inputs(op, [])
