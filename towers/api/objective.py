"""An objective: the optimizer of a loss, and which variables it trains by which gradients."""

import collections
import inspect
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_function, check_instance
from towers.errors import InvalidArgumentError
from towers.tower.objectives import Objectives

_NAME = re.compile(r'[A-Za-z0-9.][A-Za-z0-9_.\\\-]*')


class Objective(collections.namedtuple('Objective', [
        'optimizer', 'var_list', 'transform_gradients', 'gradient_options', 'name'])):
    """How a loss is minimized; `build_towers` takes it in the place of an optimizer.

    >>> towers.build_towers(model_fn, inputs, towers.Objective(
    ...     tf.train.AdamOptimizer(0.001), transform_gradients=clip_by_norm), 4, 'mean')

    Attributes:
      optimizer: a `tf.train.Optimizer`. A `compute_gradients`, or `minimize`, of its own is called
        once, for the whole batch.
      var_list: the variables to train: a list, or a function from the list of all trainable
        variables to a list of some; None for all.
      transform_gradients: called with the combined `(gradient, variable)` pairs, returns the pairs
        to apply: the place for `tf.clip_by_global_norm`. A variable without a gradient has a pair
        with None, in its place.
      gradient_options: dict of arguments for `optimizer.compute_gradients`, in every tower:
        `aggregation_method`, `gate_gradients`, `colocate_gradients_with_ops`; or None. Where
        `colocate_gradients_with_ops` would put a gradient operation on two devices, its tower's and
        a variable's, it goes to its tower's.
      name: the name of the loss in the dict that the model function returns; None for one loss.
    """
    __slots__ = ()

    def __new__(cls, optimizer: typing.Any, var_list: typing.Any = None,
                transform_gradients: typing.Optional[typing.Callable] = None,
                gradient_options: typing.Optional[dict] = None):
        check_optimizer(optimizer, or_else='')
        _check_graph_of('the learning rate of the optimizer',
                        compat.optimizer_learning_rate(optimizer))
        check_var_list(var_list)
        check_transform(transform_gradients)
        check_gradient_options(gradient_options, optimizer)
        return super(Objective, cls).__new__(cls, optimizer, var_list, transform_gradients,
                                             gradient_options or {}, None)


def checked_objectives(optimizer):
    """The losses that a build trains for, each with its optimizer.

    Args:
      optimizer: as for `build_towers`.

    Returns:
      `Objectives`.

    Raises:
      InvalidArgumentError: a value that is no optimizer.
    """
    if not isinstance(optimizer, dict):
        return Objectives([] if optimizer is None else [_objective(optimizer, 'optimizer')])
    for name in optimizer:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgumentError('optimizer has the name %.80r: expected a word such as '
                                       "'generator', the name of a loss." % (name,))
    if not optimizer:
        raise InvalidArgumentError('optimizer={}: expected an optimizer for each loss by its name, '
                                   'one optimizer, or None to evaluate.')
    objectives = [_objective(each, 'optimizer[%r]' % name)._replace(name=name)
                  for name, each in optimizer.items()]
    if len({id(each.optimizer) for each in objectives}) < len(objectives):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer of its own for each '
                                   'loss, since it keeps slots by variable.' % (optimizer,))
    return Objectives(objectives)


def _objective(given, argument):
    if isinstance(given, Objective):
        return given
    check_optimizer(given, argument, or_else='a towers.Objective' + (
        ', or None to evaluate' if argument == 'optimizer' else ''))
    return Objective(given)


def check_optimizer(optimizer, argument='optimizer', or_else='or None to evaluate'):
    """Raises `InvalidArgumentError` for an object without the methods of a `tf.train.Optimizer`.

    Args:
      optimizer: the object.
      argument: the argument's name, for the error's text.
      or_else: which other values are allowed, for the error's text.
    """
    if isinstance(optimizer, type):
        raise InvalidArgumentError('%s=%r is a class: pass an instance, such as '
                                   'tf.train.AdamOptimizer(0.001).' % (argument, optimizer))
    if isinstance(optimizer, tf.train.Optimizer):
        return
    # Some Keras optimizers have methods of these names as well, with other arguments.
    if not (hasattr(optimizer, 'compute_gradients') and hasattr(optimizer, 'apply_gradients')
            and 'global_step' in inspect.signature(optimizer.apply_gradients).parameters):
        raise InvalidArgumentError(
            '%s=%r has no compute_gradients(loss, var_list) and apply_gradients(pairs, '
            'global_step): expected a tf.train.Optimizer (Keras optimizers are none)%s.' % (
                argument, optimizer, ', ' + or_else if or_else else ''))


def check_gradient_options(options, optimizer):
    """Checks a dict of arguments of `compute_gradients`, or None; raises `InvalidArgumentError`."""
    if options is None:
        return
    check_instance('gradient_options', options, dict, 'a dict of arguments of compute_gradients')
    kinds = tf.train.Optimizer
    methods = tf.AggregationMethod
    expected = {
        'aggregation_method': (None, methods.ADD_N, methods.EXPERIMENTAL_TREE,
                               methods.EXPERIMENTAL_ACCUMULATE_N),
        'gate_gradients': (kinds.GATE_NONE, kinds.GATE_OP, kinds.GATE_GRAPH),
        'colocate_gradients_with_ops': (True, False)}
    for option, value in options.items():
        if option not in expected:
            raise InvalidArgumentError(
                'gradient_options has %.80r: expected some of %s.%s' % (
                    option, ', '.join(sorted(expected)), ' The loss is what the model function '
                    'returns: multiply it there.' if option == 'grad_loss' else ''))
        if not any(type(value) is type(each) and value == each for each in expected[option]):
            raise InvalidArgumentError('gradient_options[%r]=%.80r: expected one of %s.' % (
                option, value, ', '.join(map(repr, expected[option]))))
    parameters = inspect.signature(optimizer.compute_gradients).parameters.values()
    taken = {each.name for each in parameters}
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        for option in sorted(set(options) - taken):
            raise InvalidArgumentError('gradient_options has %r, and compute_gradients of %s '
                                       'takes none: leave it out.' % (
                                           option, type(optimizer).__name__))


def check_transform(transform_gradients):
    """Raises `InvalidArgumentError` unless it is None or a function of one argument."""
    if transform_gradients is not None:
        check_function('transform_gradients', transform_gradients, 1,
                       'a function from (gradient, variable) pairs to such pairs')


def check_var_list(var_list):
    """Raises `InvalidArgumentError` unless `var_list` is None, a function, or a list of variables.
    """
    if var_list is None:
        return
    if callable(var_list):
        check_function('var_list', var_list, 1, 'None, a list of variables, or a function from '
                       'all trainable variables to such a list')
        return
    if not isinstance(var_list, (list, tuple)):
        raise InvalidArgumentError('var_list=%.80r: expected None, a list of variables, or a '
                                   'function from all trainable variables to such a list.' % (
                                       var_list,))
    if not var_list:
        raise InvalidArgumentError('var_list=%r leaves no variable to train: name one at least; '
                                   'pass None for all, or optimizer=None to evaluate.'
                                   % (var_list,))
    for variable in var_list:
        if not isinstance(compat.keras_variable_value(variable), compat.VARIABLE_TYPES):
            raise InvalidArgumentError('var_list holds %.80r of type %s: expected variables.'
                                       % (variable, type(variable).__name__))


def _check_graph_of(name, value):
    if isinstance(value, tf.Tensor) and (
            getattr(value, 'graph', None) is not tf.get_default_graph()):
        raise InvalidArgumentError('%s=%.80r belongs to another graph than the default one: make '
                                   'it and the towers under the same tf.Graph().' % (name, value))
