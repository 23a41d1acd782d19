"""The objectives of a build: losses with their optimizers, which may have methods of their own.

An optimizer's own `compute_gradients` or `minimize` may scale the loss, add a decay of the weights,
clip the gradients, draw noise, keep the loss, or make variables. Called for each tower it would do
so to a part of the gradient. So it is called once, for the batch: the towers take plain gradients,
and the method gets a loss S in their place:

    value of S: the mean loss;  dS/dv: the combined gradient of v

What a `compute_gradients` makes of the loss before it takes gradients (a loss scale, for half
precision) is a factor dL/dS, by which the towers multiply their losses, before their backward
passes. There is one backward pass, and so one factor. A `minimize` gets the gradients when they are
combined and transformed, and multiplies them itself; its operation is the update.
"""

import abc
import collections
import contextlib
import inspect
import itertools

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError, InvalidArgumentError
from towers.graph.graph_walk import reached
from towers.graph.op_types import SIZES

_numbers = itertools.count()  # of names in TensorFlow's registry of gradients
_OF_SHAPE = SIZES | {'ZerosLike', 'OnesLike'}


class Objectives(tuple):
    """The `Objective`s of a build: none to evaluate, one without a name, or several with names.

    A value that exists once for each objective (a loss, a list of gradients) is *shaped*: with one
    objective without a name it is the value itself, else a dict from names to values.
    """

    @property
    def names(self):
        """List of their names; None where there is none or one without a name."""
        return [each.name for each in self] if self and self[0].name is not None else None

    @property
    def of_model(self):
        """The `GradientsOfModel` in the place of an optimizer; or None."""
        return next((each.optimizer for each in self
                     if isinstance(each.optimizer, GradientsOfModel)), None)

    def shaped(self, values):
        """One value for each objective, in order, as the value itself or as a dict by name."""
        values = list(values)
        if self.names is None:
            return values[0] if values else None
        return collections.OrderedDict(zip(self.names, values))

    def of(self, objective, shaped):
        """One objective's part of a shaped value: the value itself, or the entry of its name."""
        return shaped if objective.name is None else shaped[objective.name]


def map_shaped(function, *shaped):
    """Calls a function on each objective's part of some shaped values; shaped like the first."""
    if not isinstance(shaped[0], dict):
        return function(*shaped)
    return collections.OrderedDict(
        (name, function(*[each[name] for each in shaped])) for name in shaped[0])


def flat(shaped):
    """The parts of a shaped value as a list."""
    return list(shaped.values()) if isinstance(shaped, dict) else [shaped]


@contextlib.contextmanager
def of_loss(name):
    """The context in which errors about gradients say of which of several losses they are."""
    try:
        yield
    except GradientError as error:
        if name is None:
            raise
        raise GradientError('the loss %r: %s' % (name, error)) from None


def all_pairs(gradients):
    """The `(gradient, variable)` pairs of all objectives, one after the other."""
    return [pair for pairs in flat(gradients) for pair in pairs]


def with_parts(name, shaped):
    """`[(name, value)]` of a shaped value: `[('loss', …)]`, or `[('loss/generator', …), …]`."""
    if not isinstance(shaped, dict):
        return [(name, shaped)]
    return [('%s/%s' % (name, part), value) for part, value in shaped.items()]


def tensors_of(pairs):
    """The tensors of `(gradient, variable)` pairs, as a flat list."""
    return [tensor for tensor in tf.nest.flatten([gradient for gradient, _ in pairs],
                                                 expand_composites=True) if tensor is not None]


def of_values(function, gradient):
    """A function of a gradient's numbers; of `IndexedSlices` those of its rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def checked_variables(variables, called):
    """The variables of a `var_list`, each once, as a list; else `InvalidArgumentError`."""
    try:
        variables = [compat.keras_variable_value(variable) for variable in variables]
    except TypeError:
        raise InvalidArgumentError('%s returned %r: expected a list of variables.'
                                   % (called, variables)) from None
    for place, variable in enumerate(variables):
        if not isinstance(variable, compat.VARIABLE_TYPES):
            raise InvalidArgumentError('%s holds %r of type %s: expected variables.'
                                       % (called, variable, type(variable).__name__))
        if variable.graph is not tf.get_default_graph():
            raise InvalidArgumentError('%s holds %r, which belongs to another graph.'
                                       % (called, variable.op.name))
        if any(variable is each for each in variables[:place]):
            raise InvalidArgumentError('%s holds %r twice: expected each variable once.'
                                       % (called, variable.op.name))
    return variables


def times(gradient, factor):
    """A gradient, dense or sparse, times a number, a float or a scalar, in its own dtype."""
    if isinstance(factor, float) and factor == 1.:
        return gradient
    return of_values(lambda values: values * (
        tf.cast(factor, values.dtype) if isinstance(factor, tf.Tensor) else factor), gradient)


class GradientsOfModel(abc.ABC):
    """Stands in place of an optimizer where the model function calls its own: `OptimizerCalls`."""

    @abc.abstractmethod
    def weights(self, batch):
        """The weights of the towers' losses, a list; None where these count as they are."""

    @abc.abstractmethod
    def call(self, weight, placement):
        """The context of the model function's call, whose loss has this weight."""

    @abc.abstractmethod
    def fetches(self):
        """The tensors and operations of tower 0 that the update is made of: a list."""

    @abc.abstractmethod
    def slots(self):
        """List of the variables that the model's optimizers have made."""

    @abc.abstractmethod
    def optimizers(self):
        """List of the model's optimizers."""

    @abc.abstractmethod
    def compute_gradients(self, loss, var_list=None):
        """The `(gradient, variable)` pairs of tower 0's calls, weighted."""

    @abc.abstractmethod
    def of_all_towers(self, copies):
        """An object with `apply_gradients`, as an optimizer. `copies` are functions from a tensor
        of tower 0 to its copy, one for each further tower."""


# ---- an optimizer's own methods ------------------------------------------------------------------

def loss_with_gradients(loss, pairs, gradients):
    """`(S, taken)`: a tensor S with the value of a loss, and other gradients for the variables.

    `gradients(dS, earlier)` returns the variables' gradients; `earlier` lists the dS of former
    calls, and `taken` those of all calls.
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


def first_taken(taken, called):
    """The first gradient that was taken; `GradientError` without one."""
    if not taken:
        raise GradientError(called + ' takes no gradient of the loss that it is given.')
    return taken[0]


def listed_pairs(pairs):
    """An iterable of pairs, such as a `zip`, as a list of tuples; None for anything else."""
    try:
        listed = list(pairs)
    except (TypeError, RuntimeError):  # the latter for a tensor
        return None
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in listed):
        return None
    return [tuple(pair) for pair in listed]


def computes_with(gradients, surrogate, combined):
    """Whether gradients depend on the value of the surrogate, and not on its shape alone."""
    known = {tensor.op.name for tensor in tensors_of(combined)}
    return surrogate.op.name in reached(
        [tensor.op for tensor in tensors_of([(each, None) for each in gradients])],
        lambda op: () if op.name in known or op.type in _OF_SHAPE else [
            tensor.op for tensor in op.inputs][:1 if op.type == 'Print' else None])


def has_own_minimize(optimizer):
    """Whether an optimizer's `minimize` is none of TensorFlow's, nor of `tf.contrib.opt`."""
    method = getattr(optimizer, 'minimize', None)
    function = getattr(method, '__func__', method)
    if function is None or function is tf.train.Optimizer.minimize:
        return False
    # Where its code is: `functools.wraps` gives a function the module of another.
    module = getattr(function, '__globals__', {}).get('__name__', '')
    return module.split('.')[0] not in ('tensorflow', 'tensorflow_core')


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


class Minimizing:
    """Has `apply_gradients`, as an optimizer, which calls the optimizer's own `minimize`."""

    def __init__(self, optimizer, loss):
        self._optimizer, self._loss = optimizer, loss  # the mean loss over the batch

    def apply_gradients(self, pairs, global_step=None):
        """The operation of one step, of pairs whose gradient may be None."""
        given = [pair for pair in pairs if pair[0] is not None]
        surrogate, taken = loss_with_gradients(
            self._loss, given, lambda of_loss, unused_taken: [
                times(gradient, of_loss) for gradient, _ in given])
        applied = minimized(self._optimizer, surrogate, global_step,
                            [variable for _, variable in pairs])
        first_taken(taken, 'minimize of ' + type(self._optimizer).__name__)
        compat.replace_tensor(surrogate, self._loss)
        return applied
