"""The variables that a model function makes: each pinned to its device, whichever call creates it.

`tf.variable_creator_scope` sees every creation: by `tf.get_variable`, by `tf.Variable`, by layers
of any kind. Variables are resource variables on every TensorFlow, so that a copy of the graph can
read a replica in the place of a variable; checkpoints load between both kinds. `tf1_variables` has
what a program expects of them.
"""

import collections
import contextlib
import functools
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.op_types import VARIABLE_OPS
from towers.model.losses import registered_losses
from towers.placement.variable_device import Placement, only_device

DirectVariable = collections.namedtuple('DirectVariable', 'requested_name variable')
"""A variable that was not made by `get_variable`, and the name that was asked for."""

_ADVICE = {
    'already exists': (
        'variable %r exists already in this graph: pass reuse=True (or tf.AUTO_REUSE) to share it '
        'with the towers, or open a tf.variable_scope in the model function for a second set; if '
        'one call of the model function makes it twice, do either there.'),
    'does not exist': (
        'variable %r does not exist in this graph, and reuse is on where it is asked for, in '
        'build_towers or in a variable scope: it shares variables that are there already. Leave it '
        'out to make new ones, or pass tf.AUTO_REUSE to make those that are missing.'),
    'Trying to ': (
        'variable %r cannot be shared: give it the same shape, dtype and partitions as the '
        'variable that reuse= found.')}
"""Advice for a `ValueError` of `tf.get_variable`, by its words."""


class NewVariables:
    """The variables that a call of a model function makes, on the devices that a `Placement` names;
    or gets, of an earlier build.

    Attributes:
      created: the variables, in order.
      direct: `DirectVariable`s, in order of creation, with those that an earlier build has made.
      owned: names of the operations of the variables: initial values, initializers, reads.
      opened_scopes: see `BuiltTowers`.
    """

    def __init__(self, placement: Placement, earlier: typing.Any = None):
        self.created, self.direct, self.owned = [], [], set()
        self._placement = placement
        # Counters of tf.metrics are the earlier build's own: a new build counts anew.
        local = {variable.op.name for variable in tf.local_variables()}
        self._earlier = [] if earlier is None else [
            each for each in earlier.direct_variables if each.variable.op.name not in local]
        self._pending = list(self._earlier)
        self._is_again = earlier is not None
        self._graph = tf.get_default_graph()
        self.opened_scopes = compat.opened_scopes(
            self._graph) if earlier is None else earlier.opened_scopes
        self._by_name = 0  # how many calls of `get_variable` are open
        self._is_open = False

    @contextlib.contextmanager
    def recorded(self, scope: typing.Any, reuse: typing.Any) -> typing.Iterator[None]:
        """The context of the call of the model function, in the variable scope `scope`, a name or
        None; `reuse` as of `tf.variable_scope`."""
        self._is_open = True
        try:
            with self._scope(scope, reuse), tf.variable_creator_scope(self._create):
                yield
        except ValueError as error:
            found = re.match('(?:Variable|Trying to share variable) ([^ ,]+)', str(error))
            for words, text in _ADVICE.items() if found else ():
                if words in str(error).split('\n', 1)[0]:
                    raise SharedVariableError(text % found.group(1)) from error
            raise
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def outside(self) -> typing.Iterator[None]:
        """The context of variables that are not recorded as the model's: an optimizer's slots."""
        self._is_open = False
        try:
            with graph_walk.Recording(self._graph) as made:
                yield
        finally:
            self._is_open = True
        self.owned.update(op.name for op in made.operations)

    @contextlib.contextmanager
    def _scope(self, scope, reuse):
        current = tf.get_variable_scope()
        if scope is not None or reuse is not None:
            with tf.variable_scope(current if scope is None else scope, reuse=reuse,
                                   custom_getter=self._getter,
                                   auxiliary_name_scope=isinstance(scope, str)):
                if self._is_again and not isinstance(scope, str):  # which counts anew
                    compat.set_opened_scopes(self._graph, self.opened_scopes)
                yield
            return
        # The caller's scope is not entered again: that would count unnamed layers anew.
        former, reuse_before = current.custom_getter, current.reuse
        # The caller's own getter is around ours, which is nearest to the creation.
        current.set_custom_getter(self._getter if former is None else (
            lambda getter, *args, **kwargs: former(
                functools.partial(self._getter, getter), *args, **kwargs)))
        try:
            yield
        finally:
            current.set_custom_getter(former)
            # The model's own reuse_variables() ends with its call.
            compat.set_reuse(current, reuse_before)

    def _getter(self, getter, *args, **kwargs):
        self._by_name += 1
        try:
            variable = getter(*args, **kwargs)
            if tf.get_default_graph() is self._graph:
                registered_losses()  # is a tensor before the model adds it to its loss
            return variable
        finally:
            self._by_name -= 1

    def _create(self, next_creator, **kwargs):
        if not self._is_open:
            return next_creator(**kwargs)
        if tf.get_default_graph() is not self._graph:
            with tf.init_scope():  # out of the body of a loop, which is a function
                if tf.get_default_graph() is self._graph:
                    return self._create(next_creator, **kwargs)
            return next_creator(**kwargs)
        is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        requested = '/'.join(filter(None, [
            self._graph.get_name_scope(), kwargs.get('name') or 'Variable']))
        if not self._by_name and self._earlier and not is_local:
            return self._of_earlier_build(requested, kwargs)
        kwargs['use_resource'], trainable = True, kwargs.get('trainable')
        if trainable is None:  # as TF itself decides it
            trainable = kwargs.get('synchronization') != tf.VariableSynchronization.ON_READ
        with graph_walk.Recording(self._graph) as made, _away_from_operations(), \
                self._placement.scope(trainable):
            variable = next_creator(**kwargs)
        self.owned.update(op.name for op in made.operations)
        self._placement.note(variable)
        self.created.append(variable)
        if not self._by_name:
            self.direct.append(DirectVariable(requested, variable))
        return variable

    def _of_earlier_build(self, requested, kwargs):
        """The variable that an earlier build made where this one asks for one."""
        alike = [each for each in self._pending if each.requested_name == requested] or [
            each for each in self._pending
            if without_numbers(each.requested_name) == without_numbers(requested)]
        there = (alike or self._pending or [None])[0]
        wanted, made = _wanted_shape_and_dtype(kwargs), 'none'
        if there is not None:
            shape, dtype = there.variable.shape, there.variable.dtype.base_dtype
            made = '%r of shape %s and dtype %s' % (there.requested_name, shape, dtype.name)
        if not alike or not shape.is_compatible_with(wanted[0]) or dtype != wanted[1]:
            raise SharedVariableError(
                'the model function asks for %r of shape %s and dtype %s as its variable number %d '
                'made without get_variable; the earlier build made %s there. Make the same '
                'variables in the same order as the earlier build did, or make them with '
                'tf.get_variable.' % (requested, wanted[0], wanted[1].name,
                                      len(self._earlier) - len(self._pending) + 1, made))
        self._pending.remove(there)
        self.direct.append(there)
        return there.variable


def _away_from_operations():
    """A scope without `tf.colocate_with(activation)`, which would put a variable onto one tower;
    `tf.colocate_with(variable)` stays, for slots and averages."""
    graph = tf.get_default_graph()
    if all(op.type in VARIABLE_OPS for op in compat.colocated_with(graph)):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


def local_variable(like, name, initial_value, value, device, **options):
    """A local variable of another one's type and kind, of a name of its own in no scope.

    It starts with `value`; `initial_value` has only to have its shape, see `initialize_with`.
    """
    with tf.control_dependencies(None), tf.name_scope(None), only_device(device):
        variable = tf.Variable(
            initial_value, name=name, collections=[tf.GraphKeys.LOCAL_VARIABLES],
            dtype=like.dtype.base_dtype, use_resource=like.op.type == 'VarHandleOp',
            validate_shape=like.get_shape().is_fully_defined(), **options)
        compat.initialize_with(variable, value)
    return variable


@contextlib.contextmanager
def new_slots(placement, variables):
    """The context of `apply_gradients`, and the list of the slots that are made in it.

    Optimizers of TF colocate their slots with the variable. Those that make them with
    `get_variable` under the variable's name (BERT's: `<variable>/adam_m`) do not say where, and
    are put on the variable's device here.
    """
    by_name, created = {variable.op.name: variable for variable in variables}, []

    def create(next_creator, **kwargs):
        owner = owner_by_name(kwargs.get('name') or '', by_name)
        with placement.scope_of(owner) if owner is not None else contextlib.nullcontext():
            slot = next_creator(**kwargs)
        created.append(slot)
        return slot
    with tf.variable_creator_scope(create):
        yield created


def owner_by_name(name, by_name):
    """The variable whose name a slot's name extends (`dense/kernel` for `dense/kernel/Adam`): that
    of the longest such name, or None. Scopes around `apply_gradients` may stand before it."""
    parts = name.split('/')
    for start in range(len(parts) - 1):
        for end in range(len(parts) - 1, start, -1):
            owner = by_name.get('/'.join(parts[start:end]))
            if owner is not None:
                return owner
    return None


def _wanted_shape_and_dtype(kwargs):
    """The shape and dtype that a direct creation asks for; its initial value never runs."""
    initial, dtype, shape = map(kwargs.get, ('initial_value', 'dtype', 'shape'))
    if shape is not None and dtype is not None:
        return tf.TensorShape(shape), tf.as_dtype(dtype).base_dtype
    if callable(initial):
        with tf.control_dependencies(None), tf.device(None), tf.device('/cpu:0'):
            initial = initial()
    value = tf.convert_to_tensor(initial, dtype=dtype and tf.as_dtype(dtype).base_dtype)
    return tf.TensorShape(value.shape if shape is None else shape), value.dtype.base_dtype


def without_numbers(name):
    """A variable's name without the numbers that make its parts unique: `a_1/b_2` as `a/b`."""
    return re.sub(r'(_\d+)+(?=/|$)', '', name)


# ---- variable scopes by their full names ---------------------------------------------------------

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
