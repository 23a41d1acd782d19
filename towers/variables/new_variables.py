"""The variables that a model function makes: each pinned to its device, whichever call creates it.

`tf.variable_creator_scope` sees every creation: by `tf.get_variable`, by `tf.Variable`, by layers
of any kind. Variables are resource variables on every TensorFlow, so that a copy of the graph can
read a replica in the place of a variable. A checkpoint of reference variables loads into resource
variables, and the reverse. `tf1_variables` gives resource variables what a program expects of
reference variables.
"""

import contextlib
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
    """A variable that was not made by `get_variable`: TensorFlow does not find it by its name."""
    requested_name: str  # the full name that the program asked for; TensorFlow may add a number
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
"""{words of a `ValueError` of `tf.get_variable`: what to do about it}."""


class NewVariables:
    """The variables that a call of a model function makes, on the devices that a `Placement` names,
    or that it shares with an earlier build.

    Attributes:
      created: the variables that were made, in order.
      direct: the `DirectVariable`s that the model has asked for, in order, made now or by an
        earlier build.
      owned: names of the operations that belong to variables: initial values, initializers, reads.
      references_elsewhere: names of the variables that were made as resource variables here, and
        that TensorFlow makes as reference variables outside of a build.
      opened_scopes: how often each variable scope was opened before the call, by which TensorFlow
        numbers unnamed layers.
    """

    def __init__(self, placement: Placement, earlier: typing.Any = None):
        """`earlier` is the `BuiltTowers` whose variables are shared; or None."""
        self.created: typing.List[tf.Variable] = []
        self.direct: typing.List[DirectVariable] = []
        self.owned: typing.Set[str] = set()
        self.references_elsewhere: typing.Set[str] = set()
        self._graph = tf.get_default_graph()
        self._placement = placement
        self._shares_variables = earlier is not None
        if earlier is None:
            self.opened_scopes = compat.opened_scopes(self._graph)
        else:
            self.opened_scopes = earlier.opened_scopes
        # The variables of the earlier build that this build finds by the order of creation; and the
        # rest of them, which this build has not asked for yet.
        self._earlier = _shared_direct_variables(earlier)
        self._pending = list(self._earlier)
        self._open_get_variables = 0  # calls of `get_variable` that have not returned
        self._is_recording = False

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
        self._is_recording = True
        try:
            with self._scope(scope, reuse), tf.variable_creator_scope(self._create), \
                    compat.getter_of_variables(self._getter):
                yield
        except ValueError as error:
            advice = _advice(error)
            if advice is None:
                raise
            raise SharedVariableError(advice) from error
        finally:
            self._is_recording = False

    @contextlib.contextmanager
    def unrecorded(self) -> typing.Iterator[None]:
        """A context within the context of `recorded`, in which new variables are not recorded as
        the model's: an optimizer that the model function calls makes its slots in it. All
        operations that are made in it count as operations of variables (`owned`)."""
        self._is_recording = False
        try:
            with graph_walk.Recording(self._graph) as made:
                yield
        finally:
            self._is_recording = True
        self.owned.update(graph_walk.names_of(made.operations))

    def _scope(self, scope: typing.Any, reuse: typing.Any) -> typing.ContextManager[None]:
        """The context of the variable scope of the call.

        Args:
          scope, reuse: the arguments of `recorded`.
        """
        if scope is None and reuse is None:
            return _scope_of_caller()
        if scope is None:  # entered once more, since `reuse` is given on entry
            scope = tf.get_variable_scope()
        return self._entered_scope(scope, reuse)

    @contextlib.contextmanager
    def _entered_scope(self, scope: typing.Any, reuse: typing.Any) -> typing.Iterator[None]:
        """The context of a variable scope that is entered for the call.

        Unnamed layers are numbered (`dense`, `dense_1`) by what was opened in the scope before: a
        call that shares the variables of an earlier build has to begin with the same counts.

        Args:
          scope: a name or a `tf.VariableScope`.
          reuse: the argument of `tf.variable_scope`.
        """
        is_name = isinstance(scope, str)
        with tf.variable_scope(scope, reuse=reuse, auxiliary_name_scope=is_name):
            # A scope that is entered by its name counts from the beginning, as it did for the
            # earlier build. A scope that is entered as an object goes on counting.
            if self._shares_variables and not is_name:
                compat.set_opened_scopes(self._graph, self.opened_scopes)
            yield

    def _getter(self, getter: typing.Callable, *args: typing.Any,
                **kwargs: typing.Any) -> tf.Variable:
        """The getter of `tf.get_variable` in the call: within it, variables are made by name. A
        later build finds these by their names, and other variables by the order of creation.

        Args:
          getter: the function of TensorFlow that makes or finds the variable.
          *args, **kwargs: its arguments.
        """
        self._open_get_variables += 1
        try:
            variable = getter(*args, **kwargs)
            if tf.get_default_graph() is self._graph:
                # TF 2 registers the loss of a regularizer as a function, which makes a new tensor
                # at each call. `registered_losses` replaces the function by one tensor, before the
                # model adds this loss to its own.
                registered_losses()
            return variable
        finally:
            self._open_get_variables -= 1

    def _create(self, next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """The creator for `tf.variable_creator_scope`, which TensorFlow calls for every new
        variable.

        It makes a resource variable on the device of its placement. Where the model function makes
        a variable without `get_variable`, and shares the variables of an earlier build, it returns
        the earlier build's variable.
        """
        if not self._is_recording:  # in the context of `unrecorded`
            return next_creator(**kwargs)
        if tf.get_default_graph() is not self._graph:
            return self._create_from_other_graph(next_creator, kwargs)
        # 'Variable' is what TensorFlow calls a variable without a name.
        requested = self._requested_name(kwargs.get('name') or 'Variable')
        is_by_name = self._open_get_variables > 0
        # A local variable, such as a counter of `tf.metrics`, is not shared: a new build counts
        # anew.
        is_local = tf.GraphKeys.LOCAL_VARIABLES in (kwargs.get('collections') or ())
        if self._earlier and not is_by_name and not is_local:
            return self._variable_of_earlier_build(requested, kwargs)
        variable = self._make(next_creator, kwargs)
        if not is_by_name:
            self.direct.append(DirectVariable(requested, variable))
        return variable

    def _create_from_other_graph(self, next_creator: typing.Callable,
                                 kwargs: dict) -> tf.Variable:
        """What `_create` returns where the current graph is not the build's.

        The body of a loop (v2) is a function, with a graph of its own; a variable that is made in
        it belongs to the build's graph. A graph that the program has opened itself has nothing to
        do with the build: there TensorFlow makes the variable.
        """
        with tf.init_scope():  # leaves functions
            if tf.get_default_graph() is self._graph:
                return self._create(next_creator, **kwargs)
        return next_creator(**kwargs)

    def _make(self, next_creator: typing.Callable, kwargs: dict) -> tf.Variable:
        """Makes a resource variable on the device of its placement, and records it.

        Args:
          next_creator: makes the variable.
          kwargs: the arguments of the creator.
        """
        is_reference_elsewhere = not _is_made_as_resource(kwargs)
        kwargs['use_resource'] = True
        with graph_walk.Recording(self._graph) as made, _away_from_operations(), \
                self._placement.scope(trainable=_is_trainable(kwargs)):
            variable = next_creator(**kwargs)
        self.owned.update(graph_walk.names_of(made.operations))
        self._placement.note(variable)
        self.created.append(variable)
        if is_reference_elsewhere:
            self.references_elsewhere.add(variable.op.name)
        return variable

    def _requested_name(self, name: str) -> str:
        """The full name that a variable of this name would have in the current name scope."""
        scope = self._graph.get_name_scope()
        return '%s/%s' % (scope, name) if scope else name

    def _variable_of_earlier_build(self, requested: str, kwargs: dict) -> tf.Variable:
        """The variable of an earlier build that the model function gets when it asks for a variable
        without `get_variable`.

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
        made_there = 'none'  # what the earlier build has made instead, for the message
        others = alike or self._pending  # of this name; else of any name
        if others:
            variable = others[0].variable
            made_there = '%r of shape %s and dtype %s' % (
                others[0].requested_name, variable.shape, variable.dtype.base_dtype.name)
        number_found = len(self._earlier) - len(self._pending)
        raise SharedVariableError(
            'the model function asks for %r of shape %s and dtype %s as its variable number %d '
            'made without get_variable; the earlier build made %s there. Make the same variables '
            'in the same order as the earlier build did, or make them with tf.get_variable.' % (
                requested, shape, dtype.name, number_found + 1, made_there))

    def _pending_alike(self, requested: str) -> typing.List[DirectVariable]:
        """List of the earlier build's variables that this build has not asked for yet, and that a
        requested name may mean.

        They are the variables with the same requested name. If there are none, they are the
        variables whose requested names differ from it only in numbers. This is the case of a
        variable `v` that the model function makes in `tf.name_scope('n')`: the earlier build asked
        for `n/v`, and this build asks for `n_1/v`, since TensorFlow numbers a name scope that is
        entered again.
        """
        alike = [direct for direct in self._pending if direct.requested_name == requested]
        if alike:
            return alike
        bare_name = without_numbers(requested)
        return [direct for direct in self._pending
                if without_numbers(direct.requested_name) == bare_name]


@contextlib.contextmanager
def _scope_of_caller() -> typing.Iterator[None]:
    """The context of the caller's variable scope, as it is. The scope is not entered again, since
    TensorFlow would then number unnamed layers from the beginning."""
    current = tf.get_variable_scope()
    reuse_of_caller = current.reuse
    try:
        yield
    finally:
        # The model function may call `reuse_variables()`, which lasts until its call ends.
        compat.set_reuse(current, reuse_of_caller)


def _shared_direct_variables(earlier: typing.Any) -> typing.List[DirectVariable]:
    """List of the variables that an earlier build has made without `get_variable`, and that a new
    build shares. Local variables, such as counters of `tf.metrics`, are not shared, since a new
    build counts anew.

    `earlier` is the `BuiltTowers`; or None, which gives [].
    """
    if earlier is None:
        return []
    local = graph_walk.operation_names(tf.local_variables())
    return [direct for direct in earlier.direct_variables if direct.variable.op.name not in local]


def _advice(error: ValueError) -> typing.Optional[str]:
    """The text that says what to do about an error of `tf.get_variable`; None for any other error.
    """
    text = str(error)
    named = re.match('(?:Variable|Trying to share variable) ([^ ,]+)', text)
    if named is None:
        return None
    first_line = text.split('\n', 1)[0]  # the traceback of the first creation may follow
    for words, advice in _ADVICE.items():
        if words in first_line:
            return advice % named.group(1)
    return None


def _is_made_as_resource(kwargs: dict) -> bool:
    """Whether TensorFlow makes a resource variable by these arguments of a creator: as they say; as
    the variable scope says, where they do not; or by default."""
    use_resource = kwargs.get('use_resource')
    if use_resource is None:
        use_resource = tf.get_variable_scope().use_resource
    if use_resource is None:
        use_resource = tf.resource_variables_enabled()
    return use_resource


def _is_trainable(kwargs: dict) -> bool:
    """Whether TensorFlow makes a trainable variable from these arguments of a creator. Without the
    argument `trainable` a variable is trainable, unless its copies are added up when it is read
    (`ON_READ`)."""
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
    slots and averages, stays in effect."""
    graph = tf.get_default_graph()
    if all(op.type in VARIABLE_OPS for op in compat.colocated_with(graph)):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


def _wanted_shape_and_dtype(kwargs: dict) -> typing.Tuple[tf.TensorShape, tf.DType]:
    """The shape and dtype that a creation without `get_variable` asks for.

    Args:
      kwargs: the arguments of the creator. If they have no shape or no dtype, the initial value
        gives it. An initial value that is a function is called, on the CPU; the operations that the
        function makes never run.
    """
    shape = kwargs.get('shape')
    dtype = kwargs.get('dtype')
    if dtype is not None:
        dtype = tf.as_dtype(dtype).base_dtype
    if shape is not None and dtype is not None:
        return tf.TensorShape(shape), dtype
    initial_value = kwargs.get('initial_value')
    if callable(initial_value):
        with tf.control_dependencies(None), only_device('/cpu:0'):
            initial_value = initial_value()
    value = tf.convert_to_tensor(initial_value, dtype=dtype)
    if shape is None:
        shape = value.shape
    return tf.TensorShape(shape), value.dtype.base_dtype


def without_numbers(name: str) -> str:
    """A variable's name without the numbers that make its parts unique: `'a/b'` for `'a_1/b_2'`."""
    return re.sub(r'(_\d+)+(?=/|$)', '', name)
