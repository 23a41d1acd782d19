"""Checks of single arguments of `build_towers`."""

import inspect
import numbers
import re
import sys

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (check_flag, check_function, check_instance, check_number,
                              check_step_variable)
from towers.errors import InvalidArgumentError, ModelFunctionError
from towers.tower.objectives import Objective, Objectives

# TensorFlow's rules for name scopes, at the top of a graph and below.
_SCOPE = re.compile(r'[A-Za-z0-9.][A-Za-z0-9_.\\\-]*(/[A-Za-z0-9_.\\\-]+)*')


def check_build_arguments(name, variable_scope, reuse, global_step, learning_rate, gradient_options,
                          on_tower, objectives, flags):
    """Raises `InvalidArgumentError` for an argument of a type or value that `build_towers` refuses.

    Args:
      name, variable_scope, reuse, global_step, learning_rate, gradient_options, on_tower: as for
        `build_towers`.
      objectives: `Objectives`.
      flags: dict from the names of the arguments that are True or False to their values.
    """
    for flag, value in flags.items():
        check_flag(flag, value)
    if not isinstance(name, str) or not _SCOPE.fullmatch(name):
        raise InvalidArgumentError(
            "name=%.80r: expected what TensorFlow takes for a name scope, letters, digits, '_', "
            "'.', '-' and '/', such as 'tower'." % (name,))
    if variable_scope is not None:
        check_instance('variable_scope', variable_scope, (str, tf.VariableScope),
                       'a name, a tf.VariableScope or None')
        if isinstance(variable_scope, str) and not _SCOPE.fullmatch(variable_scope.rstrip('/')):
            raise InvalidArgumentError(
                "variable_scope=%.80r: expected a name of letters, digits, '_', '.', '-' and '/', "
                'or None.' % (variable_scope,))
    if not (reuse is None or isinstance(reuse, bool) or reuse is tf.AUTO_REUSE
            or hasattr(reuse, 'direct_variables')):
        raise InvalidArgumentError('reuse=%.80r: expected None, True, tf.AUTO_REUSE, or what an '
                                   'earlier build_towers returned.' % (reuse,))
    if global_step is not None:
        check_step_variable(global_step)
    if objectives.names is not None and isinstance(learning_rate, dict):
        _by_name('learning_rate', learning_rate, objectives.names)
        for key, rate in learning_rate.items():
            _check_learning_rate(rate, _named('learning_rate', learning_rate, key))
    else:
        _check_learning_rate(learning_rate)
    check_gradient_options(gradient_options, objectives)
    if on_tower is not None:
        check_function('on_tower', on_tower, 2, 'a function of the number of the tower and of the '
                       'count of towers, or None')


def check_same_graph(name, built):
    """Raises `InvalidArgumentError` for a `BuiltTowers` of another graph than the default one."""
    graphs = {getattr(variable, 'graph', None) for variable in built.variables} - {None}
    if graphs and tf.get_default_graph() not in graphs:
        raise InvalidArgumentError('%s=%r belongs to another graph than the default one: build '
                                   'under the tf.Graph() of that build.' % (name, built))


def _check_learning_rate(learning_rate, argument='learning_rate'):
    if isinstance(learning_rate, np.ndarray) and learning_rate.shape == ():
        learning_rate = learning_rate[()]
    if isinstance(learning_rate, numbers.Real):
        check_number(argument, learning_rate, least=0, most=sys.float_info.max,
                     expected='a number of at least 0')
    elif isinstance(learning_rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        if learning_rate.shape.ndims not in (0, None) or not (
                learning_rate.dtype.is_floating or learning_rate.dtype.is_integer):
            raise InvalidArgumentError('%s=%.80r of shape %s and type %s: expected a '
                                       'number.' % (argument, learning_rate, learning_rate.shape,
                                                    learning_rate.dtype.base_dtype.name))
        _check_graph_of(argument, learning_rate)
    elif learning_rate is not None and not hasattr(learning_rate, 'describe'):
        raise InvalidArgumentError('%s=%.80r: expected a number, a tensor, or an object with '
                                   'describe(), for the plan; or None.' % (
                                       argument, learning_rate))
    if hasattr(learning_rate, 'describe'):
        check_function(argument + '.describe', learning_rate.describe, 0,
                       'a method without arguments')


def _check_graph_of(name, value):
    if isinstance(value, tf.Tensor) and (
            getattr(value, 'graph', None) is not tf.get_default_graph()):
        raise InvalidArgumentError('%s=%.80r belongs to another graph than the default one: make '
                                   'it and the towers under the same tf.Graph().' % (name, value))


def check_model_fn(model_fn):
    """Raises `ModelFunctionError` for a model function that cannot be called."""
    if not callable(model_fn):
        raise ModelFunctionError('model_fn=%.80r cannot be called: expected a function from a '
                                 'shard to its loss.' % (model_fn,))


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


def check_gradient_options(options, objectives):
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
    if options and not objectives:
        raise InvalidArgumentError('gradient_options=%r, and there is no optimizer: leave them out '
                                   'to evaluate.' % (options,))
    for optimizer in [each.optimizer for each in objectives] if options else ():
        parameters = inspect.signature(optimizer.compute_gradients).parameters.values()
        taken = {each.name for each in parameters}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            for option in sorted(set(options) - taken):
                raise InvalidArgumentError('gradient_options has %r, and compute_gradients of %s '
                                           'takes none: leave it out.' % (
                                               option, type(optimizer).__name__))


def checked_objectives(optimizer, var_list, transform_gradients):
    """The losses that a build trains for, each with its optimizer.

    Args:
      optimizer, var_list, transform_gradients: as for `build_towers`.

    Returns:
      `Objectives`.

    Raises:
      InvalidArgumentError: a value that is no optimizer; names that differ between arguments.
    """
    if not isinstance(optimizer, dict):
        for argument, given in (('var_list', var_list),
                                ('transform_gradients', transform_gradients)):
            if isinstance(given, dict):
                raise InvalidArgumentError('%s=%.80r: a dict by name goes with optimizer= as a '
                                           'dict by name, for several losses.' % (argument, given))
        if optimizer is not None:
            check_optimizer(optimizer)
            _check_graph_of('the learning rate of the optimizer',
                            compat.optimizer_learning_rate(optimizer))
        check_var_list(var_list)
        _check_transform(transform_gradients)
        return Objectives([] if optimizer is None else
                          [Objective(None, optimizer, var_list, transform_gradients)])
    names = list(optimizer)
    for name in names:
        if not isinstance(name, str) or not _SCOPE.fullmatch(name) or '/' in name:
            raise InvalidArgumentError('optimizer has the name %.80r: expected a word such as '
                                       "'generator', the name of a loss." % (name,))
    if not names:
        raise InvalidArgumentError('optimizer={}: expected an optimizer for each loss by its name, '
                                   'one optimizer, or None to evaluate.')
    if len({id(each) for each in optimizer.values()}) < len(names):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer of its own for each '
                                   'loss, since it keeps slots by variable.' % (optimizer,))
    objectives = [Objective(*each) for each in zip(
        names, optimizer.values(), _by_name('var_list', var_list, names),
        _by_name('transform_gradients', transform_gradients, names))]
    for each in objectives:
        check_optimizer(each.optimizer, 'optimizer[%r]' % each.name, or_else='')
        _check_graph_of('the learning rate of optimizer[%r]' % each.name,
                        compat.optimizer_learning_rate(each.optimizer))
        check_var_list(each.var_list, _named('var_list', var_list, each.name))
        _check_transform(each.transform_gradients,
                         _named('transform_gradients', transform_gradients, each.name))
    return Objectives(objectives)


def _by_name(argument, given, names):
    """One value for each name: from a dict by name, or the same for all."""
    if not isinstance(given, dict):
        return [given] * len(names)
    if set(given) - set(names):
        raise InvalidArgumentError('%s has %.80r, and the optimizers are for %s.' % (
            argument, sorted(set(given) - set(names), key=str)[0], ', '.join(map(repr, names))))
    return [given.get(name) for name in names]


def _named(argument, given, name):
    """How an error calls one entry of a dict argument: `var_list['generator']`."""
    return '%s[%r]' % (argument, name) if isinstance(given, dict) else argument


def _check_transform(transform_gradients, argument='transform_gradients'):
    if transform_gradients is not None:
        check_function(argument, transform_gradients, 1,
                       'a function from (gradient, variable) pairs to such pairs')


def check_var_list(var_list, argument='var_list'):
    """Raises `InvalidArgumentError` unless `var_list` is None, a function, or a list of variables.

    Args:
      var_list: see `build_towers`.
      argument: the argument's name, for the error's text.
    """
    if var_list is None:
        return
    if callable(var_list):
        check_function(argument, var_list, 1, 'None, a list of variables, or a function from '
                       'all trainable variables to such a list')
        return
    if not isinstance(var_list, (list, tuple)):
        raise InvalidArgumentError('%s=%.80r: expected None, a list of variables, or a '
                                   'function from all trainable variables to such a list.' % (
                                       argument, var_list))
    if not var_list:
        raise InvalidArgumentError('%s=%r leaves no variable to train: name one at least; '
                                   'pass None for all, or optimizer=None to evaluate.'
                                   % (argument, var_list))
    for variable in var_list:
        if not isinstance(compat.keras_variable_value(variable), compat.VARIABLE_TYPES):
            raise InvalidArgumentError('%s holds %.80r of type %s: expected variables.'
                                       % (argument, variable, type(variable).__name__))
