"""What a build that failed leaves in the graph, and how the next one takes it up again.

TensorFlow cannot remove an operation. After a failed build its variables are in no collection, and
`tf.get_variable` has forgotten them; but the graph still has operations of their names, so that a
second attempt would make `w_1` where one device has `w`. So the second attempt is handed those very
variables, each with the initial value and the collections that it now asks for.
"""

import contextlib
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.placement.devices import short_name

_VARIABLES = ('towers_left_over_variables',)
_SCOPES = ('towers_left_over_scopes',)
"""Keys, no strings as those of TF's own stores, so that no meta graph holds them."""


def left_scopes(graph):
    """The name scopes of towers that were not finished."""
    return set(graph.get_collection(_SCOPES))


class Attempt:
    """One attempt to build something in a graph."""

    def __init__(self, graph, scopes):
        """
        Args:
          graph: the graph.
          scopes: full names of the name scopes that the build makes.
        """
        self._graph = graph
        self._scopes = scopes
        self._left = list(graph.get_collection(_VARIABLES))
        self._made = []

    @contextlib.contextmanager
    def undone_on_error(self, put_collections_back):
        """Within it variables are taken up again; on an error all is put back, for another attempt.

        Args:
          put_collections_back: function that does what its name says.
        """
        restore = compat.keep_variable_stores(self._graph)
        try:
            with tf.variable_creator_scope(self._create):
                yield
        except BaseException:
            put_collections_back()
            restore()
            known = set(map(id, self._left))
            self._put(_VARIABLES, self._left + [each for each in self._made
                                                if id(each) not in known])
            self._put(_SCOPES, sorted(left_scopes(self._graph) | set(self._scopes)))
            raise
        taken = set(map(id, self._made))
        self._put(_VARIABLES, [left for left in self._left if id(left) not in taken])
        self._put(_SCOPES, sorted(left_scopes(self._graph) - set(self._scopes)))

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
        return variable

    def _match(self, name):
        """The variable left over for that name; where the name is taken, TensorFlow adds numbers.
        """
        if not self._left:
            return None
        free = {left.op.name: left for left in self._left
                if not any(left is each for each in self._made)}
        if name in free:
            return free[name]
        if any(each.op.name == name for each in self._made):
            for other in free:
                if re.match(re.escape(name) + r'_\d+$', other):
                    return free[other]
        return None


def _taken_up(variable, kwargs):
    """Gives a variable left over the initial value and the collections that are asked for now."""
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
    if device != variable.device:  # other operations are colocated with it there
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
        'name in this graph, which TensorFlow cannot remove. Build in a new graph: `with '
        'tf.Graph().as_default():`, or tf.reset_default_graph().' % (name, found))
