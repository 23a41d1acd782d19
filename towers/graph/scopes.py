"""Variable scopes by their full names."""

import tensorflow.compat.v1 as tf


def full_scope_name(scope):
    """The full name of the scope that `tf.variable_scope(scope)` enters; None: the current one."""
    current = tf.get_variable_scope().name
    if scope is None:
        return current
    if isinstance(scope, tf.VariableScope):
        return scope.name
    return '/'.join(part for part in (current, scope) if part)


def scope_to_enter(full_name):
    """The argument by which `tf.variable_scope` enters the scope `full_name` from the current one.

    Initializer, regularizer and custom getter stay those of the current scope.
    """
    current = tf.get_variable_scope().name
    if full_name == current:
        return None
    if not current or full_name.startswith(current + '/'):
        return full_name[len(current):].lstrip('/')
    return like_current_scope(full_name, tf.get_variable_scope().reuse)


def like_current_scope(name, reuse):
    """A `tf.VariableScope` with this name and reuse flag, otherwise like the current one."""
    scope = tf.get_variable_scope()
    return tf.VariableScope(
        reuse, name, scope.initializer, scope.regularizer, scope.caching_device,
        scope.partitioner, scope.custom_getter,
        scope.original_name_scope if name == scope.name else name + '/' if name else '',
        scope.dtype, scope.use_resource, scope.constraint)
