"""The inputs of a build: a nest of tensors, looked at before any operation is made."""

import collections
import copy
import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_graph_mode
from towers.errors import InputError
from towers.graph import graph_walk

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
    return [None if leaf is None else _as_tensor(path, leaf) for path, leaf in inputs.leaves]


def size_and_guards(inputs, tensors):
    """The number of examples, and the assertions that all tensors have it.

    Args:
      inputs: `Inputs`.
      tensors: as `tensors_of` returns them.

    Returns:
      `(size, guards)`: an int where it is static, else an int32 scalar; and a list of operations.
    """
    sizes = [(path, _size(tensor)) for tensor, (path, _) in zip(tensors, inputs.leaves)
             if tensor is not None and (inputs.size is None or path in inputs.unknown)]
    if inputs.size is not None:
        return inputs.size, [tf.Assert(tf.equal(size, inputs.size), [
            _plain('towers: the first dimensions of the inputs differ: the others have %d and %s '
                   'has' % (inputs.size, path)), size]) for path, size in sizes]
    (first_path, size), others = sizes[0], sizes[1:]
    return size, [tf.Assert(tf.equal(size, other), [
        _plain('towers: the first dimensions of the inputs differ: %s and %s have'
               % (first_path, path)), size, other]) for path, other in others]


def check_nothing_is_trained_behind(inputs):
    """Refuses inputs that have a gradient to a trainable variable; makes no operation.

    A tower's gradient ends at its shard, so such a variable would not be trained.

    Args:
      inputs: a nest of tensors, arrays and variables.

    Raises:
      InputError: there is one.
    """
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    for leaf in tf.nest.flatten(with_sparse_tensors(inputs), expand_composites=True):
        if isinstance(leaf, (tf.Tensor,) + compat.VARIABLE_TYPES) and leaf.dtype.is_floating:
            for name in sorted(trainable & graph_walk.ancestors([leaf], ends=('StopGradient',))):
                raise InputError(
                    'the input %s is computed from the trainable variable %s, and the gradient of '
                    'a tower ends at its inputs: compute it in the model function, or pass its '
                    'tf.stop_gradient.' % (leaf.name, name))


class NamedInputs(dict):
    """A dict of inputs whose keys are names of the user's own arguments.

    Errors use these names, and do not advise to drop the rest of a batch, since the user's call has
    no argument for it.
    """


def with_sparse_tensors(inputs):
    """The nest with each `tf.SparseTensorValue` made a tensor: `tf.nest` would take it apart.

    Raises:
      InputError: a list or a dict that contains itself.
    """
    try:
        return _with_sparse_tensors(inputs)
    except RecursionError:
        raise InputError('inputs contain themselves, or are nested too deeply: expected the '
                         'tensors of one batch, [batch, ...] each.') from None


def _with_sparse_tensors(inputs):
    if isinstance(inputs, tf.SparseTensorValue):
        return tf.SparseTensor.from_value(inputs)
    if isinstance(inputs, (tuple, list)):
        parts = [_with_sparse_tensors(part) for part in inputs]
        if any(part is not before for part, before in zip(parts, inputs)):
            return type(inputs)(*parts) if hasattr(inputs, '_fields') else type(inputs)(parts)
    if isinstance(inputs, dict):
        changed = {key: part for key, part in
                   ((key, _with_sparse_tensors(inputs[key])) for key in inputs)
                   if part is not inputs[key]}
        if changed:
            inputs = copy.copy(inputs)
            inputs.update(changed)
    return inputs


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
    first = '' if isinstance(inputs, NamedInputs) else 'inputs'
    leaves = [(first + path, leaf) for path, leaf in zip(paths, flat)]
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
        parts = [(key if isinstance(nest, NamedInputs) else '[%r]' % (key,), nest[key])
                 for key in sorted(nest)]
    elif isinstance(nest, (tuple, list)):
        names = ['.' + field for field in getattr(nest, '_fields', ())]
        parts = zip(names or ['[%d]' % i for i in range(len(nest))], nest)
    else:
        return [path]
    return [each for name, part in parts for each in _paths(part, path + name)]


def _as_tensor(path, leaf):
    if isinstance(leaf, tf.SparseTensor):
        return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(path, leaf, str(error).split('\n', 1)[0]) from None


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


def _size(tensor):
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0]


def _plain(text):
    return text.replace("'", '')  # in an assertion TensorFlow puts backslashes before each quote
