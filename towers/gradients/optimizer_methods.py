"""An optimizer's own `compute_gradients` or `minimize`, which is called once, for the whole batch.

Such a method may scale the loss, add a decay of the weights, clip the gradients, draw noise, keep
the loss, or make variables. If the method were called for each tower, it would do this to a part of
the gradient only. So the towers take plain gradients, and the method gets a loss S:

    value of S: the mean loss;  dS/dv: the combined gradient of v

A `compute_gradients` may take the gradients of another loss L that it computes from S, such as
L = 1024 S for half precision. By the chain rule, dL/dv = dL/dS dS/dv, these gradients have a factor
dL/dS, here 1024. The towers multiply their losses by this factor, before their backward passes.
There is one backward pass, and so one factor.

A `minimize` is called when the gradients are combined and transformed. The gradients that it gets
are multiplied by dL/dS after the backward passes. The operation that it returns is the update.

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
    multiplied,
    tensors_of,
    times,
    variables_of,
)
from towers.graph import graph_walk
from towers.graph.op_types import SIZES
from towers.model.request import Request
from towers.placement.variable_device import only_device

_numbers = itertools.count()  # each gradient function needs a name of its own in TensorFlow
_OF_SHAPE = SIZES | {'ZerosLike', 'OnesLike'}  # types that need only the shape of an input
_WAITS_FOR_ALL_GRADIENTS = re.compile(r'tuple/control_dependency(_\d+)?$')
"""Names of the operations by which a gradient waits for the gradients of its neighbours."""


class OwnComputeGradients:
    """Takes gradients by an optimizer's own `compute_gradients`.

    Attributes:
      factor: float64 scalar, by which the towers multiply their losses: a constant 1. `pairs` later
        replaces it with dL/dS in all operations that take it.
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
        # The towers' losses are computed from the factor. So it must not wait for operations that
        # the caller's `tf.control_dependencies` name. It is float64, which can hold a factor of any
        # other float type.
        with tf.control_dependencies(None), only_device(request.placement.main):
            self.factor = tf.constant(1., tf.float64, name='loss_factor')

    def pairs(self, loss: tf.Tensor, combined: list) -> list:
        """Calls the optimizer's `compute_gradients`, and returns the `(gradient, variable)` pairs
        that it makes.

        The method has to get the gradients of the mean loss, since it may add a decay of the
        weights to them. With `reduction='sum'`, the combined gradients of N towers are N times the
        gradients of the mean loss. So the towers' losses are divided by N, and the pairs that the
        method makes are multiplied by N.

        Args:
          loss: the mean loss over this machine's batch.
          combined: the combined gradients, as pairs.
        """
        factor_of_mean = self._request.factor  # N; 1 with `reduction='mean'`

        def combined_gradients(dl_ds: tf.Tensor, earlier: list) -> list:
            """The dL/dv, where TensorFlow asks for them: the combined gradients. These have the
            factor dL/dS already, since the towers multiply their losses by it."""
            self._check_single(dl_ds, earlier, loss.graph)
            return gradients_of(combined)

        with only_device(self._request.placement.main):
            # The towers' losses need the factor, which may be computed from S. So S must not wait
            # for operations that the caller's `tf.control_dependencies` name.
            with tf.control_dependencies(None):
                surrogate = _Surrogate(loss, combined, combined_gradients)
            with graph_walk.Recording(loss.graph) as made:
                pairs = computed_pairs(self._optimizer, surrogate.loss, self._variables)
                dl_ds = surrogate.first_gradient(self._called)
                factor = tf.cast(dl_ds, tf.float64) / factor_of_mean
            # The towers' losses come before all gradients. So the factor, which the losses need,
            # must not wait for a gradient.
            _remove_waits_for_gradients(factor, graph_walk.names_of(made.operations))
            pairs = multiplied(pairs, factor_of_mean)
        self._check_known(factor, surrogate.loss, combined)
        # The gradients are taken: from here on all operations that took S take the loss itself. The
        # towers' losses, so far multiplied by a constant 1, are multiplied by the factor.
        compat.replace_tensor(surrogate.loss, loss)
        compat.replace_tensor(self.factor, factor)
        return pairs

    def _check_single(self, dl_ds: tf.Tensor, earlier: list, graph: tf.Graph) -> None:
        """Refuses a method that takes the gradient of its loss in a branch, or with several
        factors.

        Args:
          dl_ds: the factor dL/dS of the gradients that are taken now.
          earlier: the factors of the gradients that the method has taken before.
          graph: the graph of the loss.
        """
        # A branch of control flow v2 has a graph of its own.
        if dl_ds.graph is not graph or compat.in_control_flow(dl_ds.op):
            raise GradientError(self._called + ' takes the gradient of its loss within a branch or '
                                'a loop: take it outside.')
        if not earlier:
            return
        factors = [tf.get_static_value(each) for each in [dl_ds] + earlier]
        is_proven_equal = None not in factors and len(set(map(float, factors))) == 1
        if not is_proven_equal:
            raise GradientError(
                self._called + ' takes gradients of its loss with several factors, by groups of '
                'variables say, and the towers have one backward pass: take them with one factor, '
                'and multiply the gradients.')

    def _check_known(self, factor: tf.Tensor, surrogate: tf.Tensor, combined: list) -> None:
        """Refuses a factor that is computed from the value of the loss, in two cases.

        On several machines the value of the loss is the value of one worker, so that each worker
        would have another factor. With micro-batches the value is known after the last micro-batch,
        but already the loss of the first micro-batch needs the factor.

        Args:
          factor: the factor by which the towers multiply their losses.
          surrogate: the loss that the method got.
          combined: the combined gradients, as pairs.
        """
        text = self._called + (' multiplies its loss by a factor that depends on the value of the '
                               'loss, which ')
        # The combined gradients are of all machines, so that a factor may be computed from them.
        is_on_several_machines = not self._request.has_whole_batch
        if is_on_several_machines and computes_with([factor], surrogate, tensors_of(combined)):
            raise GradientError(
                text + "is of one worker's examples: let UPDATE_OPS write it to a variable, and "
                'read the variable.')
        has_micro_batches = self._request.split.accumulate > 1
        # Even a factor that only waits for the loss comes after the last micro-batch.
        if has_micro_batches and surrogate.op in graph_walk.step_operations([factor]):
            raise GradientError(text + 'is known when the last micro-batch is done: train without '
                                'accumulate= and micro_batches=.')


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
    """Whether the second element of each pair may be a variable. In pairs in the wrong order it
    would be a gradient, a tensor."""
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
        """Makes the operation of one step by calling `minimize`, which gets a loss with the
        gradients in the pairs.

        Args:
          pairs: list of `(gradient, variable)`; the gradient may be None.
          global_step: the variable that counts steps; or None.
        """
        present = [pair for pair in pairs if pair[0] is not None]

        def given_gradients(dl_ds: tf.Tensor, unused_earlier: list) -> list:
            """The gradients of L by the chain rule: the given gradients of S, times dL/dS."""
            return [times(gradient, dl_ds) for gradient, _ in present]

        surrogate = _Surrogate(self._loss, present, given_gradients)
        applied = minimized(self._optimizer, surrogate.loss, global_step, variables_of(pairs))
        # Raises an error if `minimize` has taken no gradient.
        surrogate.first_gradient('minimize of ' + type(self._optimizer).__name__)
        # The gradients are taken: from here on all operations that took S take the loss itself.
        compat.replace_tensor(surrogate.loss, self._loss)
        return applied


def computes_with(tensors: typing.Iterable[tf.Tensor], loss: tf.Tensor,
                  known: typing.Iterable[tf.Tensor]) -> bool:
    """Whether tensors are computed from the value of a loss.

    Args:
      tensors: the tensors.
      loss: the loss. An operation that needs only the shape of the loss does not count.
      known: tensors that may be computed from the loss: the search does not go beyond them.
    """
    known_names = graph_walk.operation_names(known)

    def computed_from(op: tf.Operation) -> list:
        """The operations whose values get into the results of `op`: the search goes on there."""
        if op.name in known_names or op.type in _OF_SHAPE:
            return []
        producers = graph_walk.producers_of(op)
        if op.type == 'Print':
            return producers[:1]  # the values of the other inputs are only printed
        return producers
    operations = map(graph_walk.operation_of, tensors)
    return loss.op.name in graph_walk.reached(operations, computed_from)


class _Surrogate:
    """The loss S that an optimizer's own method gets: the value of a loss, with other gradients.

    S is the first output of an `IdentityN` of the loss and of the variables' values. So TensorFlow
    takes S for a function of the variables. `tf.gradients` of a loss L by a variable v calls the
    gradient function of the `IdentityN` with dL/dS, and takes its result for dL/dv.

    Attributes:
      loss: S, a tensor.
    """

    def __init__(self, loss: tf.Tensor, pairs: Pairs, gradients: typing.Callable):
        """
        Args:
          loss: the tensor whose value S has.
          pairs: `(gradient, variable)` pairs with the variables v by which S can be differentiated.
            The gradients in the pairs are not used here.
          gradients: function `(dL/dS, earlier)` that returns the list of dL/dv, one for each
            variable. `earlier` is the list of the dL/dS of all earlier calls: a method that takes
            gradients of S several times calls `gradients` several times, and
            `OwnComputeGradients` refuses different dL/dS (`_check_single`).
        """
        self._dl_ds: typing.List[tf.Tensor] = []  # dL/dS of each call so far
        gradient_type = 'TowersWholeLoss%d' % next(_numbers)

        def backward(unused_op: tf.Operation, dl_ds: tf.Tensor, *unused_rest: typing.Any):
            """The gradients of the `IdentityN` below: None for the loss, dL/dv for each variable.
            """
            dl_dv = gradients(dl_ds, list(self._dl_ds))
            self._dl_ds.append(dl_ds)
            return [None] + dl_dv

        tf.RegisterGradient(gradient_type)(backward)
        with tf.name_scope('whole_loss'):
            values = [variable.read_value() for _, variable in pairs]
            with loss.graph.gradient_override_map({'IdentityN': gradient_type}):
                self.loss = tf.identity_n([loss] + values)[0]

    def first_gradient(self, called: str) -> tf.Tensor:
        """The dL/dS of the first gradients that a method has taken. All gradients that a
        `compute_gradients` takes have the same dL/dS, see `_check_single`.

        Args:
          called: names the method, for the error.

        Raises:
          GradientError: the method has taken no gradient.
        """
        if not self._dl_ds:
            raise GradientError(called + ' takes no gradient of the loss that it is given.')
        return self._dl_ds[0]


def _remove_waits_for_gradients(factor: tf.Tensor, made: typing.Set[str]) -> None:
    """Makes a factor wait for nothing but its inputs.

    Optimizers call `tf.gradients` with `gate_gradients`: each gradient of an operation then waits
    for the operation's other gradients. Let a method compute L = c S, with a constant c. The
    gradient for S is c, the factor; the gradient for c is S. So the factor would wait for the value
    of S, which is the loss of all towers. With micro-batches this closes a circle: the loss of the
    last micro-batch waits for the backward pass of the micro-batch before, whose loss is multiplied
    by the factor.

    Args:
      factor: the factor.
      made: names of the operations that the method has made, which may be changed.
    """
    for op in graph_walk.step_operations([factor]):
        if op.name in made and _WAITS_FOR_ALL_GRADIENTS.search(op.name):
            compat.set_control_inputs(op, [])
