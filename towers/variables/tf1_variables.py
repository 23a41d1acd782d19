"""Variables that are resource variables, and do what a TF1 program expects of reference variables.

Where the two kinds differ, a program of TensorFlow 1 was written for the reference variable:

    the program has              reference variable      resource variable     here
    v += t                       makes a tensor          error                 makes a tensor
    v.initialized_value()        the value               error on TF 2         the value
    v, in a branch in a loop     read before the loop    read in the branch    read before the loop
    an initial value from v      computed after v's      computed any time     computed after v's
    the tensor 'v:0' by name     the variable            a handle              an error

A read in a branch (v1) in a loop has no gradient on TF 1.15, and fails with "Cannot colocate nodes"
where the loop is not on the variable's device.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.variables.initial_values import after_other_variables, value_or_initial_value


@contextlib.contextmanager
def tf1_variables(graph: tf.Graph) -> typing.Iterator[None]:
    """The context in which all new resource variables of a graph do what a program of TensorFlow 1
    expects, by the table above, whoever makes them.

    In it, `graph.get_tensor_by_name('v:0')` for such a variable raises a `SharedVariableError`.
    """
    handles = set()  # names of tensors
    tensor_by_name = graph.get_tensor_by_name

    def create(next_creator: typing.Callable, **kwargs: typing.Any) -> tf.Variable:
        """A creator that makes a resource variable with the methods of `_Tf1Variable`."""
        # The body of a loop or a branch (v2) is a function, a graph of its own: `init_scope` goes
        # out of it, to the graph that gets the variable.
        with tf.init_scope():
            is_of_graph = tf.get_default_graph() is graph
        if not is_of_graph:
            return next_creator(**kwargs)
        # TensorFlow would compute an initial value at any time, also before the variables that it
        # is computed from are initialized.
        kwargs['initial_value'] = after_other_variables(
            kwargs.get('initial_value'), kwargs.get('dtype'))
        variable = next_creator(**kwargs)
        is_resource_variable = variable.op.type == 'VarHandleOp'
        if is_resource_variable:
            handles.add(variable.op.name + ':0')
            variable.__class__ = _class_like(type(variable))
        return variable

    def checked_tensor_by_name(name: str) -> tf.Tensor:
        """`graph.get_tensor_by_name`, which refuses the handles of these variables."""
        if name in handles:
            raise SharedVariableError(
                'the program takes the tensor %r by its name, which is the handle of a variable '
                'here, and not its value: take the variable itself, as tf.get_variable returns it '
                'or tf.global_variables() lists it.' % name)
        return tensor_by_name(name)

    graph.get_tensor_by_name = checked_tensor_by_name  # hides the method, for this graph only
    try:
        with tf.variable_creator_scope(create):
            yield
    finally:
        del graph.get_tensor_by_name


class _Tf1Variable:
    """The methods in which a reference variable differs from a resource variable. `_class_like`
    puts them before the methods of TensorFlow's class, which `super()` calls."""

    graph: tf.Graph

    def value(self) -> tf.Tensor:
        """The value. Within a branch in a loop, the value is read before the loop."""
        if self._is_read_in_branch_in_loop():
            with tf.control_dependencies(None):  # leaves the loop
                return super().value()  # type: ignore[misc]  # of the class of TensorFlow
        return super().value()  # type: ignore[misc]

    def sparse_read(self, indices: typing.Any, name: typing.Optional[str] = None) -> tf.Tensor:
        """Rows of the value, for `tf.gather` and `tf.nn.embedding_lookup`."""
        if self._is_read_in_branch_in_loop():
            return tf.gather(self.value(), indices, name=name)
        return super().sparse_read(indices, name)  # type: ignore[misc]

    def gather_nd(self, indices: typing.Any, name: typing.Optional[str] = None) -> tf.Tensor:
        """Parts of the value, for `tf.gather_nd`."""
        if self._is_read_in_branch_in_loop():
            return tf.gather_nd(self.value(), indices, name=name)
        return super().gather_nd(indices, name)  # type: ignore[misc]

    def _is_read_in_branch_in_loop(self) -> bool:
        """Whether operations are made now in a branch in a loop of the variable's graph."""
        return tf.get_default_graph() is self.graph and compat.in_branch_in_loop(self.graph)

    def initialized_value(self) -> tf.Tensor:
        """The value, or the initial value where the variable has none yet."""
        return value_or_initial_value(self)

    def __iadd__(self, other: typing.Any) -> tf.Tensor:
        return self + other

    def __isub__(self, other: typing.Any) -> tf.Tensor:
        return self - other

    def __imul__(self, other: typing.Any) -> tf.Tensor:
        return self * other

    def __itruediv__(self, other: typing.Any) -> tf.Tensor:
        return self / other

    def __ipow__(self, other: typing.Any) -> tf.Tensor:
        return self ** other


_classes: typing.Dict[type, type] = {}
"""{class of variables of TensorFlow: its subclass with the methods above}."""


def _class_like(kind: type) -> type:
    """The subclass of a class of variables that has the methods of `_Tf1Variable`."""
    if issubclass(kind, _Tf1Variable):
        return kind
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (_Tf1Variable, kind), {'__module__': kind.__module__})
    return _classes[kind]
