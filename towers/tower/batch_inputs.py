"""The inputs of a build: a nest of tensors, looked at before any operation is made."""

import collections
import copy
import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_graph_mode
from towers.errors import InputError, TowersError

Inputs = collections.namedtuple('Inputs', 'nest leaves size unknown')
"""Inputs that can be cut by examples.

Fields:
  nest: the nest, with a `tf.SparseTensor` in the place of each `tf.SparseTensorValue`.
  leaves: list of `(path, leaf)`; the path is for the texts of errors, such as `inputs['x']`.
  size: the first dimension of all leaves; None where it is not static.
  unknown: the paths of the leaves whose first dimension is not static.
"""


def looked_at(inputs):
    """The `Inputs` of a nest; makes no operation.

    Raises:
      InputError: what cannot be cut by examples.
    """
    check_graph_mode('what split_batch makes')
    nest = with_sparse_tensors(inputs)
    leaves = _leaves(nest)
    _check_no_lists_of_numbers(nest)
    return Inputs(nest, leaves, *_static_batch_size(leaves))


def tensors_of(inputs):
    """The leaves of `Inputs` as tensors: a list, with None for None."""
    tensors = []
    for path, leaf in inputs.leaves:
        try:
            tensors.append(leaf if leaf is None or isinstance(leaf, tf.SparseTensor) else
                           tf.convert_to_tensor(leaf))
        except TowersError:  # of the caller's device function
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise _no_tensor(path, leaf, str(error).split('\n', 1)[0]) from None
    return tensors


def size_and_guards(inputs, tensors):
    """The number of examples, and the assertions that all tensors have it.

    Args:
      inputs: `Inputs`.
      tensors: as `tensors_of` returns them.

    Returns:
      `(size, guards)`: an int where it is static, else an int32 scalar; and a list of operations.
    """
    sizes = [(path, tf.cast(tensor.dense_shape[0], tf.int32) if isinstance(
        tensor, tf.SparseTensor) else tf.shape(tensor)[0])
             for tensor, (path, _) in zip(tensors, inputs.leaves)
             if tensor is not None and (inputs.size is None or path in inputs.unknown)]
    size, of_whom = inputs.size, 'the others'
    if size is None:
        of_whom, size = sizes.pop(0)
    texts = ['towers: the first dimensions of the inputs differ: those of %s and %s are' % (
        of_whom, path) for path, _ in sizes]
    # In an assertion TensorFlow puts backslashes before each quote.
    return size, [tf.Assert(tf.equal(size, other), [text.replace("'", ''), size, other])
                  for text, (_, other) in zip(texts, sizes)]


def with_sparse_tensors(inputs):
    """The nest with each `tf.SparseTensorValue` made a tensor: `tf.nest` would take it apart.

    Raises:
      InputError: a list or a dict that contains itself.
    """
    def converted(nest):
        if isinstance(nest, tf.SparseTensorValue):
            return tf.SparseTensor.from_value(nest)
        if isinstance(nest, (tuple, list)):
            parts = list(map(converted, nest))
            return type(nest)(*parts) if hasattr(nest, '_fields') else type(nest)(parts)
        if isinstance(nest, dict):
            changed = copy.copy(nest)
            changed.update((key, converted(nest[key])) for key in nest)
            return changed
        return nest
    try:
        return converted(inputs)
    except RecursionError:
        raise InputError('inputs contain themselves, or are nested too deeply: expected the '
                         'tensors of one batch, [batch, ...] each.') from None


def _leaves(inputs):
    """[(path for error texts, leaf)]; every leaf is checked as far as is possible without an op."""
    try:
        flat = tf.nest.flatten(inputs)
    except TypeError as error:
        raise InputError('inputs cannot be taken apart: %s' % error) from None
    paths = _paths(inputs, '')
    if len(flat) == 1 and not isinstance(inputs, dict):
        paths = ['']
    elif len(paths) != len(flat):  # a nest of a kind that tf.nest alone knows
        paths = ['[%d]' % i for i in range(len(flat))]
    leaves = [('inputs' + path, leaf) for path, leaf in zip(paths, flat)]
    for path, leaf in leaves:
        if leaf is None:
            continue
        if isinstance(leaf, compat.DATASET_TYPES + (tf.data.Iterator,)):
            raise InputError('%s is a %s: pass the tensors of one batch, such as '
                             'tf.data.make_one_shot_iterator(dataset).get_next().'
                             % (path, type(leaf).__name__))
        if isinstance(leaf, (tf.RaggedTensor, tf.IndexedSlices)):
            raise InputError('%s is a %s, which cannot be cut by examples here: pass a dense or a '
                             'sparse tensor.' % (path, type(leaf).__name__))
        graph = getattr(leaf, 'graph', None)
        if graph is not None and graph is not tf.get_default_graph():
            raise InputError('%s (%s) belongs to another graph than the default one: make the '
                             'inputs and the towers under the same tf.Graph().'
                             % (path, getattr(leaf, 'values', leaf).name))
    if all(leaf is None for _, leaf in leaves):
        raise InputError('inputs=%r holds no tensor: pass the tensors of one batch, [batch, ...] '
                         'each.' % (inputs,))
    return leaves


def _check_no_lists_of_numbers(inputs):
    """Raises `InputError` for what `tolist()` makes of an array: a nest of as many scalars."""
    if isinstance(inputs, list) and inputs and all(isinstance(
            part, (numbers.Number, str, bytes)) and not isinstance(part, np.generic)
                                                   for part in inputs):
        raise InputError('inputs has the Python list %.60r, each entry of which is an input of its '
                         'own: pass np.array(...) of it, [batch, ...].' % (inputs,))
    for part in (inputs.values() if isinstance(inputs, dict) else
                 inputs if isinstance(inputs, (list, tuple)) else ()):
        _check_no_lists_of_numbers(part)


def _paths(nest, path):
    """How each leaf is got out of a nest, in the order of `tf.nest.flatten`: `['x']`, `[0].labels`.
    """
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
    """The `tf.TensorShape` of a tensor, a variable or an array, as far as it is static.

    Raises:
      InputError: the leaf at this path is no tensor and no array.
    """
    if isinstance(leaf, (tf.SparseTensor, tf.Tensor) + compat.VARIABLE_TYPES):
        return leaf.get_shape()
    array = np.asarray(leaf)
    if array.dtype == object and not array.shape:
        raise _no_tensor(path, leaf, 'no tensor and no array')
    return tf.TensorShape(array.shape)


def _static_batch_size(leaves):
    """(the first dimension of all leaves, the paths of the leaves whose first one is not static).

    The dimension is None where no leaf has a static one.
    """
    sizes, unknown = {}, []
    for path, leaf in leaves:
        if leaf is None:
            continue
        shape = static_shape(path, leaf)
        if shape.ndims == 0:
            raise InputError('%s is a scalar and has no batch dimension to cut: let the model '
                             'function take it from its closure, or leave it out of inputs.'
                             % path)
        if shape.ndims is not None and shape.as_list()[0] is not None:
            sizes[path] = shape.as_list()[0]
        else:
            unknown.append(path)
    if len(set(sizes.values())) > 1:
        raise InputError('the first dimensions of the inputs differ: %s. Every tensor needs the '
                         'same number of examples.'
                         % ', '.join('%s has %d' % item for item in sizes.items()))
    return next(iter(sizes.values())) if sizes else None, unknown
