"""The variables that a model function makes: each pinned to its device, whichever call creates it.

`tf.variable_creator_scope` sees every creation: by `tf.get_variable`, by `tf.Variable`, by layers
of any kind. Variables are resource variables on every TensorFlow, so that a copy of the graph can
read a replica in the place of a variable; checkpoints load between both kinds. `tf1_variables` has
what a program expects of them.
"""

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


class DirectVariable(typing.NamedTuple):
    """A variable that was not made by `get_variable`."""
    requested_name: str  # that the program asked for
    variable: tf.Variable


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
    """The variables that a call of a model function makes, on the devices that a `Placement` names,
    or that it shares with an earlier build.

    Attributes:
      created: the variables that were made, in order.
      direct: the `DirectVariable`s that the model has asked for, in order, made now or by an
        earlier build.
      owned: names of the operations that belong to variables: initial values, initializers, reads.
      opened_scopes: see `BuiltTowers`.
    """

    def __init__(self, placement: Placement, earlier: typing.Any = None):
        """`earlier` is the `BuiltTowers` whose variables are shared; or None."""
        self.created: typing.List[tf.Variable] = []
        self.direct: typing.List[DirectVariable] = []
        self.owned: typing.Set[str] = set()
        self._graph = tf.get_default_graph()
        self._placement = placement
        self._is_again = earlier is not None
        self._earlier: typing.List[DirectVariable] = []
        if earlier is None:
            self.opened_scopes = compat.opened_scopes(self._graph)
        else:
            self.opened_scopes = earlier.opened_scopes
            # Counters of tf.metrics are the earlier build's own: a new build counts anew.
            local = graph_walk.operation_names(tf.local_variables())
            for direct in earlier.direct_variables:
                if direct.variable.op.name not in local:
                    self._earlier.append(direct)
        self._pending = list(self._earlier)  # those that this build has not asked for yet
        self._by_name = 0  # how many calls of `get_variable` are open
        self._is_open = False

    @contextlib.contextmanager
    def recorded(self, scope: typing.Any, reuse: typing.Any) -> typing.Iterator[None]:
        """The context of the call of the model function, in which its variables are recorded.

        Args:
          scope: the variable scope that is entered, a name or a `tf.VariableScope`; None for the
            current one.
          reuse: the argument of `tf.variable_scope`.

        Raises:
          SharedVariableError: a variable that is made twice, or cannot be shared.
        """
        self._is_open = True
        try:
            with self._scope(scope, reuse), tf.variable_creator_scope(self._create):
                yield
        except ValueError as error:
            advice = _advice(error)
            if advice is None:
                raise
            raise SharedVariableError(advice) from error
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
        self.owned.update(graph_walk.names_of(made.operations))

    @contextlib.contextmanager
    def _scope(self, scope: typing.Any, reuse: typing.Any) -> typing.Iterator[None]:
        """The variable scope of the call, in which `_getter` is the custom getter.

        Unnamed layers are numbered (`dense`, `dense_1`) by what was opened in the scope before: a
        call that shares the variables of an earlier build has to begin with the same counts.

        Args:
          scope, reuse: the arguments of `recorded`.
        """
        current = tf.get_variable_scope()
        if scope is not None or reuse is not None:
            is_name = isinstance(scope, str)
            with tf.variable_scope(current if scope is None else scope, reuse=reuse,
                                   custom_getter=self._getter, auxiliary_name_scope=is_name):
                if self._is_again and not is_name:  # a name counts anew
                    compat.set_opened_scopes(self._graph, self.opened_scopes)
                yield
            return
        # The caller's scope is not entered again: that would count unnamed layers anew.
        getter_of_caller = current.custom_getter
        reuse_of_caller = current.reuse
        current.set_custom_getter(self._getter_within(getter_of_caller))
        try:
            yield
        finally:
            current.set_custom_getter(getter_of_caller)
            # The model's own reuse_variables() ends with its call.
            compat.set_reuse(current, reuse_of_caller)

    def _getter_within(self, outer: typing.Optional[typing.Callable]) -> typing.Callable:
        """The custom getter that calls the caller's own one, if there is one, around `_getter`.

        Args:
          outer: the caller's custom getter; or None.
        """
        if outer is None:
            return self._getter

        def getter_of_both(getter: typing.Callable, *args: typing.Any,
                           **kwargs: typing.Any) -> tf.Variable:
            return outer(functools.partial(self._getter, getter), *args, **kwargs)
        return getter_of_both

    def _getter(self, getter: typing.Callable, *args: typing.Any,
                **kwargs: typing.Any) -> tf.Variable:
        """A custom getter of `tf.get_variable`: within it, variables are made by name. A later
        build finds these by their names, and other variables by the order of creation."""
        self._by_name += 1
        try:
            variable = getter(*args, **kwargs)
            if tf.get_default_graph() is self._graph:
                registered_losses()  # is a tensor before the model adds it to its loss
            return variable
        finally:
            self._by_name -= 1

    def _create(self, next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """The creator for `tf.variable_creator_scope`, which TensorFlow calls for every new
        variable.

        It makes a resource variable on the device of its placement. In the place of a variable that
        an earlier build has made without `get_variable`, it returns that one.
        """
        if not self._is_open:
            return next_creator(**kwargs)
        if tf.get_default_graph() is not self._graph:
            with tf.init_scope():  # out of the body of a loop, which is a function
                if tf.get_default_graph() is self._graph:
                    return self._create(next_creator, **kwargs)
            return next_creator(**kwargs)
        requested = self._requested_name(kwargs.get('name') or 'Variable')
        is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        if self._earlier and not self._by_name and not is_local:
            return self._of_earlier_build(requested, kwargs)
        kwargs['use_resource'] = True
        with graph_walk.Recording(self._graph) as made, _away_from_operations(), \
                self._placement.scope(_is_trainable(kwargs)):
            variable = next_creator(**kwargs)
        self.owned.update(graph_walk.names_of(made.operations))
        self._placement.note(variable)
        self.created.append(variable)
        if not self._by_name:
            self.direct.append(DirectVariable(requested, variable))
        return variable

    def _requested_name(self, name: str) -> str:
        """The full name that a variable of this name would have in the current name scope."""
        scope = self._graph.get_name_scope()
        return '%s/%s' % (scope, name) if scope else name

    def _of_earlier_build(self, requested: str, kwargs: dict) -> tf.Variable:
        """The variable that an earlier build has made in the place of one that is asked for now.

        Args:
          requested: the name that is asked for.
          kwargs: the arguments of its creator.

        Raises:
          SharedVariableError: the earlier build has made another variable there.
        """
        alike = self._pending_alike(requested)
        shape, dtype = _wanted_shape_and_dtype(kwargs)
        if alike and _may_hold(alike[0].variable, shape, dtype):
            self._pending.remove(alike[0])
            self.direct.append(alike[0])
            return alike[0].variable
        made_there = 'none'
        candidates = alike or self._pending
        if candidates:
            variable = candidates[0].variable
            made_there = '%r of shape %s and dtype %s' % (
                candidates[0].requested_name, variable.shape, variable.dtype.base_dtype.name)
        number = len(self._earlier) - len(self._pending) + 1
        raise SharedVariableError(
            'the model function asks for %r of shape %s and dtype %s as its variable number %d '
            'made without get_variable; the earlier build made %s there. Make the same variables '
            'in the same order as the earlier build did, or make them with tf.get_variable.' % (
                requested, shape, dtype.name, number, made_there))

    def _pending_alike(self, requested: str) -> typing.List[DirectVariable]:
        """List of the variables of the earlier build that were not asked for yet and have this
        requested name; if there are none, those whose names differ only in numbers."""
        pending = self._pending
        alike = [direct for direct in pending if direct.requested_name == requested]
        if alike:
            return alike
        bare = without_numbers(requested)
        return [direct for direct in pending if without_numbers(direct.requested_name) == bare]


def _advice(error: ValueError) -> typing.Optional[str]:
    """The text that says what to do about an error of `tf.get_variable`; None for any other error.
    """
    text = str(error)
    found = re.match('(?:Variable|Trying to share variable) ([^ ,]+)', text)
    if found is None:
        return None
    for words, advice in _ADVICE.items():
        if words in text.split('\n', 1)[0]:
            return advice % found.group(1)
    return None


def _is_trainable(kwargs: dict) -> bool:
    """Whether TensorFlow makes a trainable variable from these arguments of a creator."""
    trainable = kwargs.get('trainable')
    if trainable is None:
        return kwargs.get('synchronization') != tf.VariableSynchronization.ON_READ
    return trainable


def _may_hold(variable: tf.Variable, shape: tf.TensorShape, dtype: tf.DType) -> bool:
    """Whether a variable has this dtype, and a shape that is compatible with this one."""
    return variable.shape.is_compatible_with(shape) and variable.dtype.base_dtype == dtype


def _away_from_operations() -> typing.ContextManager:
    """The context for a new variable in which a `tf.colocate_with(activation)` around it has no
    effect, since it would put the variable onto one tower. A `tf.colocate_with(variable)`, as for
    slots and averages, stays."""
    graph = tf.get_default_graph()
    if all(op.type in VARIABLE_OPS for op in compat.colocated_with(graph)):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


def local_variable(like: tf.Variable, name: str, initial_value: typing.Any, value: typing.Any,
                   device: typing.Optional[str], **options: typing.Any) -> tf.Variable:
    """Makes a local variable, outside of all name scopes.

    Args:
      like: a variable of the same dtype and kind.
      name: the name of the new one.
      initial_value: a value of the same shape; see `compat.initialize_with`.
      value: the value that it starts with.
      device: its device; or None.
      **options: other arguments of `tf.Variable`.
    """
    with tf.control_dependencies(None), tf.name_scope(None), only_device(device):
        variable = tf.Variable(
            initial_value, name=name, collections=[tf.GraphKeys.LOCAL_VARIABLES],
            dtype=like.dtype.base_dtype, use_resource=like.op.type == 'VarHandleOp',
            validate_shape=like.get_shape().is_fully_defined(), **options)
        compat.initialize_with(variable, value)
    return variable


@contextlib.contextmanager
def new_slots(placement: Placement,
              variables: typing.Iterable[tf.Variable]) -> typing.Iterator[typing.List[tf.Variable]]:
    """The context of `apply_gradients`, in which slots are put beside their variables.

    Optimizers of TF colocate their slots with the variable. Those that make them with
    `get_variable` under the variable's name (BERT's: `<variable>/adam_m`) do not say where, and
    are put on the variable's device here.

    Args:
      placement: the devices of the variables.
      variables: those that gradients are applied to.

    Yields:
      A list, to which the slots are added as they are made.
    """
    by_name = graph_walk.variables_by_name(variables)
    created = []

    def create(next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """A creator that makes a slot on the device of the variable whose name it has."""
        owner = owner_by_name(kwargs.get('name') or '', by_name)
        scope = contextlib.nullcontext() if owner is None else placement.scope_of(owner)
        with scope:
            slot = next_creator(**kwargs)
        created.append(slot)
        return slot

    with tf.variable_creator_scope(create):
        yield created


def owner_by_name(name: str,
                  by_name: typing.Dict[str, tf.Variable]) -> typing.Optional[tf.Variable]:
    """Finds the variable that a slot belongs to: its name is in the slot's name.

    `dense/kernel` is in `dense/kernel/Adam`, and in `scope/dense/kernel/Adam`, where a scope was
    open around `apply_gradients`. The longest name counts.

    Args:
      name: the name of the slot.
      by_name: {name: variable}.

    Returns:
      The variable; None if there is none.
    """
    steps = name.split('/')
    for start in range(len(steps) - 1):
        for end in range(len(steps) - 1, start, -1):
            owner = by_name.get('/'.join(steps[start:end]))
            if owner is not None:
                return owner
    return None


def _wanted_shape_and_dtype(kwargs: dict) -> typing.Tuple[tf.TensorShape, tf.DType]:
    """The shape and dtype that a creation without `get_variable` asks for.

    Args:
      kwargs: the arguments of the creator. If they have no shape or dtype, the initial value among
        them tells; a function is called for it, on the CPU, and what it makes never runs.
    """
    shape = kwargs.get('shape')
    dtype = kwargs.get('dtype')
    if dtype is not None:
        dtype = tf.as_dtype(dtype).base_dtype
    if shape is not None and dtype is not None:
        return tf.TensorShape(shape), dtype
    initial_value = kwargs.get('initial_value')
    if callable(initial_value):
        with tf.control_dependencies(None), tf.device(None), tf.device('/cpu:0'):
            initial_value = initial_value()
    value = tf.convert_to_tensor(initial_value, dtype=dtype)
    if shape is None:
        shape = value.shape
    return tf.TensorShape(shape), value.dtype.base_dtype


def without_numbers(name: str) -> str:
    """A variable's name without the numbers that make its parts unique: `'a/b'` for `'a_1/b_2'`."""
    return re.sub(r'(_\d+)+(?=/|$)', '', name)


# ---- variable scopes by their full names ---------------------------------------------------------

def full_scope_name(scope: typing.Any) -> str:
    """The full name of the scope that `tf.variable_scope(scope)` enters; for None that of the
    current one."""
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
    current = tf.get_variable_scope().name
    if full_name == current:
        return None
    if not current or full_name.startswith(current + '/'):
        return full_name[len(current):].lstrip('/')
    return like_current_scope(full_name, tf.get_variable_scope().reuse)


def like_current_scope(name: str, reuse: typing.Any) -> tf.VariableScope:
    """A `tf.VariableScope` with this name and reuse flag, otherwise like the current one."""
    scope = tf.get_variable_scope()
    if name == scope.name:
        name_scope = scope.original_name_scope
    else:
        name_scope = name + '/' if name else ''
    return tf.VariableScope(
        reuse, name, scope.initializer, scope.regularizer, scope.caching_device,
        scope.partitioner, scope.custom_getter, name_scope, scope.dtype, scope.use_resource,
        scope.constraint)
