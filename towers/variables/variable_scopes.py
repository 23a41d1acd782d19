"""Variable scopes by their full names: how a scope is entered from within another scope.

Its test is `tests/variables/test_new_variables.py`.
"""

import typing

import tensorflow.compat.v1 as tf


def full_scope_name(scope: typing.Any) -> str:
    """The full name of the scope that `tf.variable_scope(scope)` enters; for None the name of the
    current scope."""
    current = tf.get_variable_scope().name
    if scope is None:
        return current
    if isinstance(scope, tf.VariableScope):
        return scope.name
    return '/'.join(filter(None, [current, scope]))


def scope_to_enter(full_name: str) -> typing.Any:
    """The argument by which `tf.variable_scope` enters a scope from the current one.

    Initializer, regularizer and custom getter stay those of the current scope.

    Args:
      full_name: the full name of the scope.

    Returns:
      A name; a `tf.VariableScope` for a scope that is not below the current one; None for the
      current one.
    """
    current = tf.get_variable_scope()
    if full_name == current.name:
        return None
    if not current.name or full_name.startswith(current.name + '/'):
        return full_name[len(current.name):].lstrip('/')
    return like_current_scope(full_name, current.reuse)


def like_current_scope(name: str, reuse: typing.Any) -> tf.VariableScope:
    """A `tf.VariableScope` with this name and reuse flag, otherwise like the current scope."""
    scope = tf.get_variable_scope()
    if name == scope.name:
        # The name scope need not be 'a/': when the variable scope 'a' is entered again, TensorFlow
        # numbers the name scope, 'a_1/'.
        name_scope = scope.original_name_scope
    elif name:
        name_scope = name + '/'  # with the slash TensorFlow takes it as a full name
    else:
        name_scope = ''
    return tf.VariableScope(
        reuse, name, scope.initializer, scope.regularizer, scope.caching_device,
        scope.partitioner, scope.custom_getter, name_scope, scope.dtype, scope.use_resource,
        scope.constraint)
