"""The inputs of a build: a nest of tensors, looked at before any operation is made.

A tower's gradient ends at its shard. A trained variable that the batch itself is computed from, an
embedding that was looked up before the build, say, gets its gradient once, from all towers'
gradients with respect to their shards:

    dL/dv = sum over the inputs x of (dL/dx)^T dx/dv,   dL/dx = the towers' dL_k/dx_k, in order

Its tests are `tests/shards/test_cut_batch.py`, and `tests/gradients/test_backward_pass.py` for
trained variables.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_graph_mode
from towers.errors import InputError, TowersError
from towers.graph import graph_walk
from towers.placement.variable_device import only_device


class Leaf(typing.NamedTuple):
    """A tensor of a nest of inputs, or what becomes one.

    Attributes:
      path: its name in errors, such as `inputs['x']`.
      value: a dense or sparse tensor, a variable, an array; or None, which stays None.
    """
    path: str
    value: typing.Any


class SizeOfBatch(typing.NamedTuple):
    """The number of examples, and what makes certain that all inputs have it.

    Attributes:
      size: an int, or an int32 scalar that the step computes.
      guards: list of the assertions that have to run before the batch is cut.
    """
    size: typing.Union[int, tf.Tensor]
    guards: typing.List[tf.Operation]


class Inputs(typing.NamedTuple):
    """Inputs that can be cut by examples.

    Attributes:
      leaves: list of the `Leaf`s.
      size: the first dimension of the leaves; None if it is static for no leaf.
      unknown: the paths of leaves whose first dimension is not static.
    """
    leaves: typing.List[Leaf]
    size: typing.Optional[int]
    unknown: typing.List[str]


def checked_inputs(inputs: typing.Any) -> Inputs:
    """Checks a nest of inputs, and takes it apart; makes no operation.

    Args:
      inputs: the nest.

    Returns:
      Its `Inputs`.

    Raises:
      InputError: a leaf that cannot be cut by examples; static numbers of examples that differ.
      InvalidArgumentError: TensorFlow executes eagerly.
    """
    # For a call of `split_batch`: a build has checked the mode before.
    check_graph_mode('the result of split_batch')
    leaves = _leaves(inputs)
    static_sizes = {}  # {path: first dimension}
    unknown = []
    for path, value in leaves:
        if value is None:
            continue
        size = _static_size(path, value)
        if size is None:
            unknown.append(path)
        else:
            static_sizes[path] = size
    if len(set(static_sizes.values())) > 1:
        found = ', '.join('%s has %d' % item for item in static_sizes.items())
        raise InputError('the first dimensions of the inputs differ: %s. Every tensor needs the '
                         'same number of examples.' % found)
    static_size = next(iter(static_sizes.values()), None)
    return Inputs(leaves, static_size, unknown)


def _static_size(path: str, leaf: typing.Any) -> typing.Optional[int]:
    """The first dimension of a leaf; None if it is not static. Raises `InputError`, which names the
    path of the leaf, for a scalar."""
    shape = static_shape(path, leaf)
    if shape.ndims is None:
        return None
    if shape.ndims == 0:
        raise InputError('%s is a scalar and has no batch dimension to cut: let the model '
                         'function take it from its closure. A placeholder of a finished model is '
                         'no input, and fed as before (in check_towers: feed={placeholder: '
                         'value}). Of a Python list of numbers pass np.array(...).' % path)
    return shape.as_list()[0]


def tensors_of_leaves(leaves: typing.Iterable[Leaf]) -> list:
    """List of the leaves as tensors; None stays None. Raises `InputError` for a leaf that no tensor
    can be made of."""
    return list(itertools.starmap(_tensor_of, leaves))


def _tensor_of(path: str, value: typing.Any) -> typing.Union[None, tf.Tensor, tf.SparseTensor]:
    """The value of a leaf as a tensor. Raises `InputError`, which names its path, if no tensor can
    be made of it."""
    if value is None or isinstance(value, tf.SparseTensor):
        return value
    try:
        return tf.convert_to_tensor(value)
    except TowersError:
        # The error comes from the caller's device function, and says what is wrong there. Many a
        # `TowersError` is also a `ValueError`, but this one is no error about the leaf.
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(path, value, str(error).split('\n', 1)[0]) from None


def size_and_guards(inputs: Inputs, tensors: list) -> SizeOfBatch:
    """The number of examples, and assertions that all tensors have it. Tensors of a static size
    have been compared by `checked_inputs`, and need no assertion.

    Args:
      inputs: the inputs.
      tensors: their leaves as tensors, see `tensors_of_leaves`.
    """
    sizes_in_step = {}  # {path: size} of the tensors whose size only the step knows
    for tensor, leaf in zip(tensors, inputs.leaves):
        if leaf.path in inputs.unknown:
            sizes_in_step[leaf.path] = _size_of(tensor)
    size = inputs.size
    compared_with = 'the others'
    if size is None:  # the other leaves are compared with the first leaf
        compared_with = inputs.unknown[0]
        size = sizes_in_step.pop(compared_with)
    guards = []
    for path, other_size in sizes_in_step.items():
        text = 'towers: the first dimensions of the inputs differ: those of %s and %s are' % (
            compared_with, path)
        # Without quotes: an assertion of TensorFlow puts a backslash before each quote.
        text = text.replace("'", '')
        guards.append(tf.Assert(tf.equal(size, other_size), [text, size, other_size]))
    return SizeOfBatch(size, guards)


def _size_of(tensor: typing.Union[tf.Tensor, tf.SparseTensor]) -> tf.Tensor:
    """The first dimension of a tensor: an int32 scalar."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0]


def _leaves(inputs: typing.Any) -> typing.List[Leaf]:
    """List of the leaves of a nest, checked as far as that takes no operation."""
    leaves = _taken_apart(inputs)
    for leaf in leaves:
        _check_leaf(leaf.path, leaf.value)
    if all(leaf.value is None for leaf in leaves):
        raise InputError('inputs=%.80r holds no tensor: pass the tensors of one batch, [batch, ...]'
                         ' each.' % (inputs,))
    return leaves


def _taken_apart(inputs: typing.Any) -> typing.List[Leaf]:
    """List of the leaves of a nest. Raises `InputError` if it cannot be taken apart."""
    try:
        paths = _paths(inputs, '')
        values = tf.nest.flatten(inputs)
    except TypeError as error:
        raise InputError('inputs cannot be taken apart: %s' % error) from None
    except RecursionError:
        raise InputError('inputs contain themselves, or are nested too deeply: expected the '
                         'tensors of one batch, [batch, ...] each.') from None
    is_single = len(values) == 1 and not isinstance(inputs, dict)
    if is_single:
        paths = ['']  # errors call it `inputs`, not `inputs[0]`
    elif len(paths) != len(values):  # a nest of a kind that `tf.nest` knows, and `_paths` does not
        paths = ['[%d]' % position for position in range(len(values))]
    return [Leaf('inputs' + path, value) for path, value in zip(paths, values)]


def _check_leaf(path: str, leaf: typing.Any) -> None:
    """Raises `InputError` for a leaf that cannot be cut, or belongs to another graph; the error
    names its path."""
    if isinstance(leaf, compat.DATASET_TYPES + (
            tf.data.Iterator, tf.RaggedTensor, tf.IndexedSlices)):
        raise InputError('%s is a %s, which cannot be cut by examples: pass dense or sparse '
                         'tensors of one batch, such as tf.data.make_one_shot_iterator(dataset)'
                         '.get_next().' % (path, type(leaf).__name__))
    graph = getattr(leaf, 'graph', None)
    if graph is not None and graph is not tf.get_default_graph():
        # A sparse tensor has no name.
        named = leaf.values if isinstance(leaf, tf.SparseTensor) else leaf
        name = getattr(named, 'name', type(leaf).__name__)
        raise InputError('%s (%s) belongs to another graph than the default one: make the '
                         'inputs and the towers under the same tf.Graph().' % (path, name))


def _paths(nest: typing.Any, path: str) -> typing.List[str]:
    """List of the path of each leaf of a nest, such as `['x']` or `[0].labels`, in the order of
    `tf.nest.flatten`.

    Args:
      nest: the nest.
      path: the path of the nest itself, with which the paths of its leaves begin.
    """
    if isinstance(nest, tf.SparseTensorValue):  # a named tuple, which `tf.nest` would take apart
        raise InputError('inputs%s is a SparseTensorValue: pass tf.SparseTensor.from_value(…) of '
                         'it.' % path)
    is_namedtuple = isinstance(nest, tuple) and hasattr(nest, '_fields')
    paths = []
    if isinstance(nest, dict):
        for key in sorted(nest):
            paths += _paths(nest[key], '%s[%r]' % (path, key))
    elif is_namedtuple:
        for field in nest._fields:
            paths += _paths(getattr(nest, field), '%s.%s' % (path, field))
    elif isinstance(nest, (tuple, list)):
        for position, inner in enumerate(nest):
            paths += _paths(inner, '%s[%d]' % (path, position))
    else:  # a leaf
        paths.append(path)
    return paths


def _no_tensor(path: str, leaf: typing.Any, because: str) -> InputError:
    """The error for a leaf, at a path, that no tensor can be made of; `because` says why."""
    return InputError('%s is a %s, which cannot be made a tensor of this graph: %s. Pass dense or '
                      'sparse tensors, or arrays of numbers or strings.'
                      % (path, type(leaf).__name__, because.rstrip('.')))


def static_shape(path: str, leaf: typing.Any) -> tf.TensorShape:
    """The static `tf.TensorShape` of a leaf: a tensor, a variable, or what numpy makes an array of.
    Raises `InputError`, which names the path of the leaf, for anything else."""
    if isinstance(leaf, (tf.SparseTensor, tf.Tensor) + compat.VARIABLE_TYPES):
        return leaf.get_shape()
    array = np.asarray(leaf)
    # Of an object that numpy does not know it makes a scalar.
    if array.dtype == object and not array.shape:
        raise _no_tensor(path, leaf, 'no tensor and no array')
    return tf.TensorShape(array.shape)


# ---- trained variables upstream of the batch -----------------------------------------------------

def _upstream_of(leaf: typing.Any, variables: typing.Iterable[tf.Variable]) -> typing.List[str]:
    """Sorted list of the names of those variables that a leaf of a nest is computed from, and has a
    gradient to."""
    if not isinstance(leaf, (tf.Tensor,) + compat.VARIABLE_TYPES):
        return []  # an array, say
    if not (leaf.dtype.is_floating or leaf.dtype.is_complex):  # TensorFlow differentiates these
        return []
    names = graph_walk.operation_names(variables)
    return sorted(names & graph_walk.ancestors([leaf], ends=('StopGradient',)))


def _variables_named(variables: typing.Iterable[tf.Variable],
                     names: typing.Container[str]) -> typing.List[tf.Variable]:
    """List of the variables whose operations have names among `names`."""
    return [variable for variable in variables if variable.op.name in names]


def check_nothing_is_trained_upstream(leaves: typing.Any,
                                      perhaps_trained: typing.Sequence[tf.Variable]) -> None:
    """Raises `InputError` if a tensor in a nest is computed from a variable that may be trained.

    It is for inputs whose `UpstreamVariables` the build cannot train: sparse tensors, and `Shards`.

    Args:
      leaves: the nest.
      perhaps_trained: the variables that may be trained.
    """
    for leaf in tf.nest.flatten(leaves, expand_composites=True):
        for name in _upstream_of(leaf, perhaps_trained):
            raise InputError(
                'the input %s is computed from the variable %s, which may be trained, and the '
                'gradient of a tower ends at its inputs: compute it in the model function, or pass '
                'its tf.stop_gradient.' % (leaf.name, name))


class UpstreamVariables(typing.NamedTuple):
    """The variables upstream of the inputs of a build that may be trained: an input is computed
    from them, as by an embedding in the input pipeline.

    Attributes:
      inputs: the nest of inputs, at which a tower's gradients end.
      leaves: list of its leaves that are computed from such variables; None for the others.
      variables: list of the variables.
    """
    inputs: typing.Any = ()
    leaves: typing.Sequence[typing.Optional[tf.Tensor]] = ()
    variables: typing.Sequence[tf.Variable] = ()

    def shard_tensors(self, shard: typing.Any) -> typing.List[tf.Tensor]:
        """List of the tensors of a shard that are cut from leaves with trained variables
        upstream."""
        tensors = []
        for tensor, leaf in zip(tf.nest.flatten(shard), self.leaves):
            if leaf is not None:
                tensors.append(tensor)
        return tensors

    def gradients(self, gradients_of_shards: typing.Sequence[list], sizes: list,
                  trained: typing.Iterable[tf.Variable]) -> typing.List[list]:
        """Takes the gradients of those variables that are trained, once for all towers.

        The towers' gradients end at their shards. Joined, they are the gradient with respect to an
        input, and from there `tf.gradients` goes on to the variables.

        Args:
          gradients_of_shards: for each shard the gradients with respect to its `shard_tensors`;
            None for an input that the loss does not depend on.
          sizes: the shards' numbers of examples. The padding after them gets no gradient.
          trained: the trained variables.

        Returns:
          A list of lists `[(gradient, variable)]`, to be combined with the gradients of the towers:
          it has one list of pairs; it is [] if no variable is trained here.
        """
        variables = _variables_named(self.variables, graph_walk.operation_names(trained))
        if not variables:
            return []
        with tf.name_scope('behind_batch'):
            joined = self._joined(gradients_of_shards, sizes)
            if not joined.examples:
                return []
            gradients = tf.gradients(joined.examples, variables, joined.gradients)
            return [list(zip(gradients, variables))]

    def _joined(self, gradients_of_shards: typing.Sequence[list], sizes: list) -> '_Joined':
        """Joins the gradients of the shards; it has the arguments of `gradients`."""
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        gradients_by_leaf = zip(*gradients_of_shards)  # for each leaf, the gradients of all shards
        joined = _Joined(examples=[], gradients=[])
        for leaf, gradients_of_leaf in zip(leaves, gradients_by_leaf):
            # All towers compute the same model: the loss of tower 0 tells of all losses.
            loss_depends_on_leaf = gradients_of_leaf[0] is not None
            if loss_depends_on_leaf:
                with only_device(leaf.device or None):
                    joined.gradients.append(_joined_gradient(gradients_of_leaf, sizes))
                    # A remainder of the batch may have been dropped: no shard has it.
                    joined.examples.append(leaf[:sum(sizes)])
        return joined


class _Joined(typing.NamedTuple):
    """The examples of all shards, in the order of the batch, for each leaf that the loss depends
    on; and the gradients of all towers' losses with respect to them."""
    examples: typing.List[tf.Tensor]
    gradients: typing.List[tf.Tensor]


def _joined_gradient(gradients: typing.Sequence, sizes: list) -> tf.Tensor:
    """The gradient with respect to the examples of all shards, in the order of the batch.

    Args:
      gradients: the gradients with respect to the shards.
      sizes: the shards' numbers of examples. What follows them in a shard is padding.
    """
    rows = []
    for gradient, size in zip(gradients, sizes):
        rows.append(tf.convert_to_tensor(gradient)[:size])
    return tf.concat(rows, 0)


def upstream_variables(inputs: typing.Any,
                       perhaps_trained: typing.Sequence[tf.Variable]) -> UpstreamVariables:
    """Finds the variables upstream of a nest of inputs that may be trained.

    An input that is computed from such variables is replaced by its `tf.stop_gradient`, so that no
    tower takes their gradients for itself: `UpstreamVariables.gradients` takes them once.

    Args:
      inputs: the nest.
      perhaps_trained: the variables that may be trained; a variable may be listed twice.

    Raises:
      InputError: such a variable is upstream of a sparse tensor.
    """
    leaves = tf.nest.flatten(inputs)
    sparse_leaves = [leaf for leaf in leaves if isinstance(leaf, tf.SparseTensor)]
    check_nothing_is_trained_upstream(sparse_leaves, perhaps_trained)
    leaves_with_upstream: typing.List[typing.Optional[tf.Tensor]] = []
    ends_of_gradients = []  # the leaves, as the towers take them
    names: typing.Set[str] = set()
    for leaf in leaves:
        names_of_leaf = _upstream_of(leaf, perhaps_trained)
        names.update(names_of_leaf)
        if names_of_leaf:
            tensor = tf.convert_to_tensor(leaf)
            leaves_with_upstream.append(tensor)
            ends_of_gradients.append(tf.stop_gradient(tensor))
        else:
            leaves_with_upstream.append(None)
            ends_of_gradients.append(leaf)
    if names:
        inputs = tf.nest.pack_sequence_as(inputs, ends_of_gradients)
    each_once = graph_walk.variables_by_name(perhaps_trained).values()
    variables = _variables_named(each_once, names)
    return UpstreamVariables(inputs, leaves_with_upstream, variables)
