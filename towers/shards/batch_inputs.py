"""The inputs of a build: a nest of tensors, looked at before any operation is made.

A tower's gradient ends at its shard. A trained variable that the batch itself is computed from, an
embedding that was looked up before the build, say, gets its gradient once, from all towers'
gradients with respect to their shards:

    dL/dv = sum over the inputs x of (dL/dx)^T dx/dv,   dL/dx = the towers' dL_k/dx_k, in order
"""

import collections
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_graph_mode
from towers.errors import InputError, TowersError
from towers.graph import graph_walk
from towers.placement.variable_device import only_device

Inputs = collections.namedtuple('Inputs', 'leaves size unknown')
"""Inputs that can be cut by examples: list of `(path, leaf)`, with paths for errors, `inputs['x']`;
their first dimension, None if not static; the paths of leaves that do not say it."""


def checked_inputs(inputs):
    """The `Inputs` of a nest, or `InputError` for a leaf that cannot be cut; makes no operation."""
    check_graph_mode('the result of split_batch')
    leaves, sizes, unknown = _leaves(inputs), {}, []
    for path, leaf in leaves:
        if leaf is None:
            continue
        shape = static_shape(path, leaf)
        if shape.ndims == 0:
            raise InputError('%s is a scalar and has no batch dimension to cut: let the model '
                             'function take it from its closure, or leave it out of inputs; of a '
                             'Python list of numbers pass np.array(...).' % path)
        if shape.ndims is not None and shape.as_list()[0] is not None:
            sizes[path] = shape.as_list()[0]
        else:
            unknown.append(path)
    if len(set(sizes.values())) > 1:
        raise InputError('the first dimensions of the inputs differ: %s. Every tensor needs the '
                         'same number of examples.'
                         % ', '.join('%s has %d' % item for item in sizes.items()))
    return Inputs(leaves, next(iter(sizes.values()), None), unknown)


def tensors_of_leaves(leaves):
    """The leaves of `Inputs` as tensors: a list, with None for None."""
    tensors = []
    for path, leaf in leaves:
        try:
            tensors.append(leaf if leaf is None or isinstance(leaf, tf.SparseTensor) else
                           tf.convert_to_tensor(leaf))
        except TowersError:  # of the caller's device function
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_tensor(path, leaf, str(error).split('\n', 1)[0]) from None
    return tensors


def size_and_guards(inputs, tensors):
    """`(size, guards)`: the number of examples, an int or an int32 scalar; and a list of assertions
    that all tensors, as `tensors_of_leaves` returns them, have it."""
    sizes = [(path, tf.cast(tensor.dense_shape[0], tf.int32) if isinstance(
        tensor, tf.SparseTensor) else tf.shape(tensor)[0])
             for tensor, (path, _) in zip(tensors, inputs.leaves) if path in inputs.unknown]
    size, of_whom = inputs.size, 'the others'
    if size is None:
        of_whom, size = sizes.pop(0)
    texts = ['towers: the first dimensions of the inputs differ: those of %s and %s are' % (
        of_whom, path) for path, _ in sizes]
    # In an assertion TensorFlow puts backslashes before each quote.
    return size, [tf.Assert(tf.equal(size, other), [text.replace("'", ''), size, other])
                  for text, (_, other) in zip(texts, sizes)]


def _leaves(inputs):
    """[(path for error texts, leaf)]; every leaf is checked as far as is possible without an op."""
    try:
        paths = _paths(inputs, '')
        flat = tf.nest.flatten(inputs)
    except TypeError as error:
        raise InputError('inputs cannot be taken apart: %s' % error) from None
    except RecursionError:
        raise InputError('inputs contain themselves, or are nested too deeply: expected the '
                         'tensors of one batch, [batch, ...] each.') from None
    if len(flat) == 1 and not isinstance(inputs, dict):
        paths = ['']
    elif len(paths) != len(flat):  # a nest of a kind that tf.nest alone knows
        paths = ['[%d]' % i for i in range(len(flat))]
    leaves = [('inputs' + path, leaf) for path, leaf in zip(paths, flat)]
    for path, leaf in leaves:
        if isinstance(leaf, compat.DATASET_TYPES + (
                tf.data.Iterator, tf.RaggedTensor, tf.IndexedSlices)):
            raise InputError('%s is a %s, which cannot be cut by examples: pass dense or sparse '
                             'tensors of one batch, such as tf.data.make_one_shot_iterator(dataset)'
                             '.get_next().' % (path, type(leaf).__name__))
        graph = getattr(leaf, 'graph', None)
        if graph is not None and graph is not tf.get_default_graph():
            name = getattr(getattr(leaf, 'values', leaf), 'name', type(leaf).__name__)
            raise InputError('%s (%s) belongs to another graph than the default one: make the '
                             'inputs and the towers under the same tf.Graph().' % (path, name))
    if all(leaf is None for _, leaf in leaves):
        raise InputError('inputs=%.80r holds no tensor: pass the tensors of one batch, [batch, ...]'
                         ' each.' % (inputs,))
    return leaves


def _paths(nest, path):
    """The path of each leaf of a nest, in the order of `tf.nest.flatten`: `['x']`, `[0].labels`."""
    if isinstance(nest, tf.SparseTensorValue):  # which `tf.nest` would take apart
        raise InputError('inputs%s is a SparseTensorValue: pass tf.SparseTensor.from_value(…) of '
                         'it.' % path)
    if isinstance(nest, dict):
        parts = [('[%r]' % (key,), nest[key]) for key in sorted(nest)]
    elif isinstance(nest, (tuple, list)):
        names = ['.' + field for field in getattr(nest, '_fields', ())]
        parts = zip(names or ['[%d]' % i for i in range(len(nest))], nest)
    else:
        return [path]
    return [each for name, part in parts for each in _paths(part, path + name)]


def _no_tensor(path, leaf, because):
    return InputError('%s is a %s, which cannot be made a tensor of this graph: %s. Pass dense or '
                      'sparse tensors, or arrays of numbers or strings.'
                      % (path, type(leaf).__name__, because.rstrip('.')))


def static_shape(path, leaf):
    """The `tf.TensorShape` of a tensor, a variable or an array, as far as it is static."""
    if isinstance(leaf, (tf.SparseTensor, tf.Tensor) + compat.VARIABLE_TYPES):
        return leaf.get_shape()
    array = np.asarray(leaf)
    if array.dtype == object and not array.shape:
        raise _no_tensor(path, leaf, 'no tensor and no array')
    return tf.TensorShape(array.shape)


# ---- trained variables behind the batch ---------------------------------------------------------

def _trained_behind(leaf):
    """Names of the trainable variables that a leaf of a nest has a gradient to: a sorted list."""
    if not isinstance(leaf, (tf.Tensor,) + compat.VARIABLE_TYPES) or not leaf.dtype.is_floating:
        return []
    return sorted({variable.op.name for variable in tf.trainable_variables()} &
                  graph_walk.ancestors([leaf], ends=('StopGradient',)))


def check_nothing_is_trained_behind(leaves):
    """Raises `InputError` for tensors that have a gradient to a trainable variable."""
    for leaf in tf.nest.flatten(leaves, expand_composites=True):
        for name in _trained_behind(leaf):
            raise InputError(
                'the input %s is computed from the trainable variable %s, and the gradient of a '
                'tower ends at its inputs: compute it in the model function, or pass its '
                'tf.stop_gradient.' % (leaf.name, name))


class VariablesBehindInputs(collections.namedtuple(
        'VariablesBehindInputs', 'inputs leaves variables', defaults=((), (), ()))):
    """The trainable variables that the inputs of a build are computed from.

    Attributes:
      inputs: the nest of inputs, behind which no gradient is taken.
      leaves: list of its leaves that are computed from such variables; None for the others.
    """
    __slots__ = ()

    def shard_tensors(self, shard: typing.Any) -> typing.List[tf.Tensor]:
        """The tensors of a shard behind which trained variables are: a list."""
        return [tensor for tensor, leaf in zip(tf.nest.flatten(shard), self.leaves)
                if leaf is not None]

    def gradients(self, of_shards: list, sizes: list, trained: list) -> typing.List[list]:
        """`[[(gradient, variable)]]` of trained variables, as `combine` takes them; or [].

        `of_shards` has each shard's gradients with respect to `shard_tensors`, None for an input
        that the loss does not depend on; padding behind the `sizes` gets no gradient.
        """
        trained = {variable.op.name for variable in trained}
        variables, ys, grads = [v for v in self.variables if v.op.name in trained], [], []
        if not variables:
            return []
        leaves = [leaf for leaf in self.leaves if leaf is not None]
        with tf.name_scope('behind_batch'):
            for leaf, parts in zip(leaves, zip(*of_shards)):
                if parts[0] is not None:
                    with only_device(leaf.device or None):
                        grads.append(tf.concat([tf.convert_to_tensor(part)[:size]
                                                for part, size in zip(parts, sizes)], 0))
                        ys.append(leaf[:sum(sizes)])  # a remainder may have been dropped
            return [list(zip(tf.gradients(ys, variables, grads), variables))] if ys else []


def variables_behind(inputs):
    """The `VariablesBehindInputs` of a nest; `InputError` where they are behind a sparse tensor."""
    leaves = tf.nest.flatten(inputs)
    check_nothing_is_trained_behind([each for each in leaves if isinstance(each, tf.SparseTensor)])
    names = list(map(_trained_behind, leaves))
    behind = [tf.convert_to_tensor(leaf) if each else None for leaf, each in zip(leaves, names)]
    names = set().union(*names)
    return VariablesBehindInputs(
        inputs if not names else tf.nest.pack_sequence_as(inputs, [
            leaf if each is None else tf.stop_gradient(each)
            for leaf, each in zip(leaves, behind)]),
        behind, [each for each in tf.trainable_variables() if each.op.name in names])
