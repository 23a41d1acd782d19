"""The variables of a build that failed, and how the next build uses them again.

TensorFlow cannot remove an operation. After a failed build its variables are in no collection, and
`tf.get_variable` has forgotten them; but the graph still has operations of their names, so that a
second attempt would make `w_1` where one device has `w`. So the second attempt gets the variables
of the first one, with the initial values and the collections that it now asks for.

A variable that the program has kept (in a Keras layer, a dictionary, a template, a moving average,
an optimizer's slots) is not asked for again: it is read. Then the variable goes back into the
collections that it was in, to be trained, initialised and saved.
"""

import collections
import contextlib
import re
import sys

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.collection_views import looks_by
from towers.graph.variable_access import count_reads
from towers.placement.devices import short_name

_AVERAGED = tf.GraphKeys.MOVING_AVERAGE_VARIABLES

_VARIABLES = ('towers_left_over_variables',)
_SCOPES = ('towers_left_over_scopes',)
_BUILDS = ('towers_builds',)
"""Keys that are no strings, like those of TF's own stores, so that no meta graph holds them."""


def of_the_program(graph):
    """List of the operations that were made so far outside of all builds, failed ones included."""
    operations, begin, found = graph.get_operations(), 0, []
    for start, end in graph.get_collection(_BUILDS):
        found += operations[begin:start]
        begin = max(begin, end)
    return found + operations[begin:]


def left_scopes(graph):
    """The name scopes of the towers of failed builds."""
    return set(graph.get_collection(_SCOPES))


Left = collections.namedtuple('Left', 'variable keys requested regularized')
"""A variable of a build that failed.

Fields:
  variable: the variable.
  keys: the collections that it was in.
  requested: the name that was asked for, which TensorFlow may have added a number to.
  regularized: whether a registered regularization loss was computed from it.
"""


class Attempt:
    """One attempt to build towers in a graph."""

    def __init__(self, graph):
        self._graph = graph
        self._left = list(graph.get_collection(_VARIABLES))
        self._made = []
        self._requested = {}  # id of a variable made -> the name that was asked for
        self._remembered = set()  # ids of variables that `tf.get_variable` was made to find
        self._looked_at = set()  # collections that the model function has read
        self._start = len(graph.get_operations())

    @contextlib.contextmanager
    def undone_on_error(self, scopes, put_collections_back):
        """The context of a build: uses the variables of a failed build; is undone on an error.

        Args:
          scopes: full names of the name scopes that the build makes.
          put_collections_back: function without arguments that gives the graph's collections the
            contents that they had before the build.
        """
        restore = compat.keep_variable_stores(self._graph)
        try:
            with tf.variable_creator_scope(self._create):
                yield
            self.take_back()
        except BaseException:
            left = self._after_failure()
            put_collections_back()
            restore()
            self._put(_VARIABLES, left)
            entered = {scope for scope in scopes
                       if self._graph.unique_name(scope, mark_as_used=False) != scope}
            self._put(_SCOPES, sorted(left_scopes(self._graph) | entered))
            raise
        finally:
            self._graph.add_to_collection(
                _BUILDS, (self._start, len(self._graph.get_operations())))
        taken = set(map(id, self._made))
        self._put(_VARIABLES, [left for left in self._left if id(left.variable) not in taken])
        self._put(_SCOPES, sorted(left_scopes(self._graph) - set(scopes)))

    @contextlib.contextmanager
    def first_call(self):
        """The scope of the model function's first call; call `take_back` after it.

        Raises:
          SharedVariableError: at the end of the scope, where the call has made fewer variables of
            one name than the build that failed: it cannot be told which of them it has kept.
        """
        if not self._left:
            yield
            return
        get_collection = self._graph.get_collection

        def noting(name, scope=None):
            if name != tf.GraphKeys.GLOBAL_VARIABLES or not _reads_for_itself(sys._getframe(1)):
                self._looked_at.add(name)
            return get_collection(name, scope)
        with looks_by(self._graph, noting):
            yield
        self._check_names()

    def take_back(self):
        """Puts variables that the attempt read, but did not ask for, back into their collections.

        Returns:
          List of these variables.

        Raises:
          SharedVariableError: the model function has read a collection while the variable was
            missing there.
        """
        free = self._free()
        if not free:
            return []
        reads = count_reads(self._graph.get_operations()[self._start:])
        taken = [left for left in free
                 if reads[left.variable.op.name] or id(left.variable) in self._remembered]
        for left in taken:
            missed = sorted(self._looked_at.intersection(left.keys))
            if missed:
                raise SharedVariableError(
                    'variable %r is left over from a build that failed, and the program has kept '
                    'it. The model function reads the collection %r, where it was not any more. '
                    '%s' % (left.variable.op.name, missed[0], _IN_A_NEW_GRAPH))
            if left.regularized and left.variable.op.name not in self._regularized():
                raise SharedVariableError(
                    'variable %r is left over from a build that failed, and the program has kept '
                    'it. Its regularization loss was registered as it was made, and is not any '
                    'more. %s' % (left.variable.op.name, _IN_A_NEW_GRAPH))
            self._put_back(left)
        return [left.variable for left in taken]

    def remember(self, name):
        """Makes `tf.get_variable` find a left-over variable of that name; False if there is none.

        The variable joins its collections after the call, since a template allows no new one there.
        """
        for left in self._free():
            if left.variable.op.name == name and compat.remember_variable(
                    self._graph, name, left.variable):
                self._remembered.add(id(left.variable))
                return True
        return False

    def _put_back(self, left):
        for key in left.keys:
            self._join(key, left.variable)
        self._made.append(left.variable)
        # A variable joins the collection of averaged variables only when its average is made.
        for other in self._left:
            if _AVERAGED in other.keys and (
                    left.variable.op.name.startswith(other.variable.op.name + '/')):
                self._join(_AVERAGED, other.variable)

    def _join(self, key, variable):
        if not any(variable is each for each in self._graph.get_collection_ref(key)):
            self._graph.add_to_collection(key, variable)

    def _free(self):
        made = set(map(id, self._made))
        return [left for left in self._left if id(left.variable) not in made]

    def _after_failure(self):
        """The list of `Left` for the next attempt."""
        known = {id(left.variable): left for left in self._left}
        keys = collections.defaultdict(list)
        for key in self._graph.get_all_collection_keys():
            for entry in self._graph.get_collection_ref(key):
                keys[id(entry)].append(key)
        regularized = self._regularized()
        for variable in self._made:
            before = known.get(id(variable), Left(variable, (), None, False))
            known[id(variable)] = Left(
                variable, tuple(dict.fromkeys(before.keys + tuple(keys[id(variable)]))),
                self._requested.get(id(variable), before.requested),
                before.regularized or variable.op.name in regularized)
        return list(known.values())

    def _regularized(self):
        return graph_walk.ancestors([
            loss for loss in self._graph.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
            if isinstance(loss, tf.Tensor)])

    def _check_names(self):
        # TensorFlow and `ModelsNames` number names that are taken.
        left = collections.Counter(_without_number(each.requested) for each in self._left)
        made = collections.Counter(map(_without_number, self._requested.values()))
        for name, count in left.items():
            if 0 < made[name] < count:
                raise SharedVariableError(
                    'a build that failed has left %d variables that are called %r, and the model '
                    'function makes %d now: which of them it has kept, if any, cannot be told. %s'
                    % (count, name, made[name], _IN_A_NEW_GRAPH))

    def _put(self, key, entries):
        if entries or self._graph.get_collection(key):
            self._graph.get_collection_ref(key)[:] = entries

    def _create(self, next_creator, **kwargs):
        scope = self._graph.get_name_scope()
        name = (kwargs.get('name') or 'Variable').rstrip('/')
        name = '%s/%s' % (scope, name) if scope else name
        left = self._match(name)
        if left is not None:
            variable = _taken_up(left, kwargs)
        else:
            variable = next_creator(**kwargs)
        self._made.append(variable)
        self._requested[id(variable)] = name
        return variable

    def _match(self, name):
        """The left-over variable that was requested under that name, perhaps numbered since."""
        if not self._left:
            return None
        free = {left.variable.op.name: left.variable for left in self._free()}
        if name in free:
            return free[name]
        if any(each.op.name == name for each in self._made):
            for other in free:
                if re.match(re.escape(name) + r'_\d+$', other):
                    return free[other]
        return None


def _without_number(name):
    return re.sub(r'_\d+$', '', name)


def _reads_for_itself(frame):
    """Whether TensorFlow reads a collection for itself, and not on behalf of the program."""
    passed_on = ('framework.ops', 'ops.variables', 'tower.seen_variables')
    while frame is not None and frame.f_globals.get('__name__', '').endswith(passed_on):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get('__name__', '').startswith('tensorflow')


def _taken_up(variable, kwargs):
    """Gives a left-over variable the initial value and the collections that are asked for now."""
    initial = kwargs.get('initial_value')
    device = _device_of_the_moment(variable)
    with tf.control_dependencies(None), tf.name_scope(variable.op.name + '/again/'):
        if callable(initial):
            initial = initial()
        dtype = kwargs.get('dtype')
        value = tf.convert_to_tensor(initial, dtype=dtype and tf.as_dtype(dtype).base_dtype)
    if value.dtype.base_dtype != variable.dtype.base_dtype or not value.shape.is_compatible_with(
            variable.shape):
        raise _new_graph(variable.op.name, '%s of shape %s' % (
            variable.dtype.base_dtype.name, variable.shape))
    trainable = kwargs.get('trainable')
    trainable = True if trainable is None else bool(trainable)
    wants_resource = kwargs.get('use_resource')
    if trainable != variable.trainable or (
            wants_resource is not None
            and bool(wants_resource) != (variable.op.type == 'VarHandleOp')):
        raise _new_graph(variable.op.name, 'one of another kind')
    if device != variable.device:  # other operations are colocated with the variable there
        raise _new_graph(variable.op.name, 'one on %s' % short_name(variable.device))
    compat.initialize_with(variable, value, as_initial_value=True)
    keys = list(kwargs.get('collections') or [tf.GraphKeys.GLOBAL_VARIABLES])
    if trainable and tf.GraphKeys.TRAINABLE_VARIABLES not in keys:
        keys.append(tf.GraphKeys.TRAINABLE_VARIABLES)
    tf.get_default_graph().add_to_collections(keys, variable)
    return variable


def _device_of_the_moment(variable):
    with tf.control_dependencies(None), tf.name_scope(variable.op.name + '/again/'):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name='').device


def _new_graph(name, found):
    return SharedVariableError(
        'variable %r cannot be made as it is asked for: a build that failed has left %s of that '
        'name in this graph, which TensorFlow cannot remove. %s' % (name, found, _IN_A_NEW_GRAPH))


_IN_A_NEW_GRAPH = ('Build in a new graph: `with tf.Graph().as_default():`, or '
                   'tf.reset_default_graph().')
