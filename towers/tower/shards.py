"""Cuts a batch into a shard per tower, on the CPU."""

import collections
import copy
import functools
import math
import numbers
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (check_choice, check_count, check_flag, check_function,
                              check_graph_mode, check_instance)
from towers.errors import InputError, InvalidArgumentError, TowersError
from towers.placement.devices import canonical_device

REMAINDERS = ('error', 'weight', 'drop')


class CutBatch(collections.namedtuple('CutBatch', 'inputs sizes weights batch_size')):
    """A batch of `n` examples, cut into N shards.

    Attributes:
      inputs: list of N nests, each shaped like the whole one; every dense tensor of a shard is a
        `placeholder_with_default`, so that one tower can be fed by hand.
      sizes: list of N numbers of examples `n_k`: ints where the batch is static, else int32
        scalars.
      weights: list of N shares `n_k / n`: floats where the batch is static, else float64
        scalars. They sum to one.
      batch_size: `n`, counting only examples that are used: an int or an int32 scalar.
    """
    __slots__ = ()

    @property
    def is_even(self):
        """Whether it is certain that all shards have the same number of examples."""
        return all(weight is self.weights[0] for weight in self.weights)


def split_batch(inputs: typing.Any, num_shards: int, remainder: str = 'error',
                pad_empty: bool = True, device: typing.Any = '/cpu:0', called: str = 'towers',
                shares: typing.Optional[typing.Sequence[int]] = None) -> CutBatch:
    """Cuts every tensor of a nest along its first dimension.

    Args:
      inputs: a nest (tuple, list, dict, namedtuple) of dense or sparse tensors of any dtype, or
        of arrays or `tf.SparseTensorValue`s, each [n, …]. A None in it stays None in every shard.
      num_shards: N, the number of shards.
      remainder: what to do with a batch that N does not divide. `'error'`: an error, before any
        op is made where n is static, when the step runs where it is not. `'weight'`: the first
        `n mod N` shards get one example more, and `weights` says so. `'drop'`: the last
        `n mod N` examples are left out.
      pad_empty: with `'weight'` and n < N, what the shards without an example hold: the batch's
        first example, at weight 0, so that no mean over nothing (NaN) ever gets into a gradient
        or a moving average (True); or nothing (False, for evaluation).
      device: where the splitting ops go: the name of one device, a device function, or None.
      called: what the errors call the shards: 'towers', or 'micro-batches'.
      shares: the proportions of the shards, N whole numbers: `[3, 1]` cuts 400 examples into 300
        and 100. None: equal parts.

    Returns:
      `CutBatch`. The examples keep their order: shard 0 has the first ones.

    Raises:
      InputError: no tensor at all, a scalar, first dimensions that differ, a batch that does not
        divide, an unsupported type, a tensor of another graph.
      InvalidArgumentError: an unknown `remainder`; no number of shards; `shares` that are not N
        whole numbers.
      DeviceError: `device` is no device's name.
    """
    check_choice('remainder', remainder, REMAINDERS)
    check_count('num_shards', num_shards)
    num_shards = int(num_shards)
    check_flag('pad_empty', pad_empty)
    check_instance('called', called, str, "a word such as 'towers'")
    if callable(device):
        device = _checked_device_function(device)
    elif device is not None:
        canonical_device(device)
    shares = checked_shares(shares, num_shards)
    inputs, leaves, static_size, unknown = _looked_at(inputs, shares, remainder, called)
    with tf.name_scope('shards'), tf.device(None), tf.device(device):
        tensors = [None if leaf is None else _as_tensor(path, leaf) for path, leaf in leaves]
        if static_size is None:
            size, guards = _dynamic_batch_size(tensors, leaves, shares, remainder, called,
                                               not isinstance(inputs, NamedInputs))
        else:
            size, guards = static_size, _size_guards(tensors, leaves, static_size, unknown)
        bounds, used = _bounds(size, shares, remainder)
        with tf.control_dependencies(guards):
            columns = [[None] * num_shards if tensor is None else
                       _cut(tensor, bounds, used if remainder == 'drop' else None, pad_empty)
                       for tensor in tensors]
    inputs_of_shards = [
        tf.nest.pack_sequence_as(inputs, [column[k] for column in columns])
        for k in range(num_shards)]
    sizes = [count for _, count in bounds]
    return CutBatch(inputs_of_shards, sizes, _weights(sizes, used, shares, remainder), used)


def same_kind(batches):
    """Checks that nests have one structure, types and ranks: the static size of each, or None.

    Raises:
      InputError: they have not, or one of them cannot be a shard.
    """
    looks = [_looked_at(batch, (1,), 'weight', 'towers') for batch in batches]
    first = looks[0]
    for number, (inputs, leaves, _, _) in enumerate(looks):
        try:
            tf.nest.assert_same_structure(first[0], inputs)
        except (TypeError, ValueError) as error:
            raise InputError('shard %d has another structure than shard 0: %s'
                             % (number, str(error).split('\n', 1)[0])) from None
        for (path, leaf), (_, other) in zip(leaves, first[1]):
            kinds = [(None,) if each is None else (
                isinstance(each, tf.SparseTensor), getattr(each, 'dtype', None)) for each in (
                    leaf, other)]
            if kinds[0] != kinds[1] or leaf is not None and not _static_shape(
                    path, leaf)[1:].is_compatible_with(_static_shape(path, other)[1:]):
                raise InputError('%s of shard %d is %s, and of shard 0 %s: expected one type and '
                                 'shape [n, …].' % (path, number, leaf, other))
    return [size for _, _, size, _ in looks]


def whole_shard(batch, is_even):
    """(inputs, size) of a shard that the caller has cut, as they are in a `CutBatch`.

    Args:
      batch: a nest that `same_kind` has checked.
      is_even: whether all shards have the same static size.
    """
    inputs, leaves, size, unknown = _looked_at(batch, (1,), 'weight', 'towers')
    with tf.device(None), tf.device(lambda op: (
            op.inputs[0].device if len(op.inputs) else '') or '/cpu:0'):
        tensors = [None if leaf is None else _as_tensor(path, leaf) for path, leaf in leaves]
        if size is None:
            size, guards = _dynamic_batch_size(tensors, leaves, (1,), 'weight', 'tower', False)
        else:
            guards = _size_guards(tensors, leaves, size, unknown)
        with tf.control_dependencies(guards):
            fed = [None if tensor is None else _sparse_shard(tensor, 0, size, False)
                   if isinstance(tensor, tf.SparseTensor) else
                   tf.placeholder_with_default(tf.identity(tensor), tensor.shape if is_even else
                                               tf.TensorShape([None]).concatenate(tensor.shape[1:]))
                   for tensor in tensors]
    return tf.nest.pack_sequence_as(inputs, fed), size


def checked_shares(shares, count, called='shards'):
    """The proportions of the shards, without a common divisor: a tuple of `count` ints.

    Args:
      shares: whole numbers; None for equal parts.
      count: how many there have to be.
      called: what they are the parts of, for the error's text.

    Raises:
      InvalidArgumentError: other values, or another number of them.
    """
    if shares is None:
        return (1,) * count
    if not isinstance(shares, (tuple, list)) or len(shares) != count or not all(
            isinstance(share, numbers.Integral) and not isinstance(share, bool) and share > 0
            for share in shares):
        raise InvalidArgumentError('shares=%.80r for %d %s: expected a whole number of at least 1 '
                                   'for each, such as %r.' % (
                                       shares, count, called, [3] + [1] * (count - 1)))
    divisor = functools.reduce(math.gcd, map(int, shares))
    return tuple(int(share) // divisor for share in shares)


def _checked_device_function(function):
    check_function('device', function, 1,
                   "a device's name, a function from an operation to one, or None")

    def device(op):
        found = function(op)
        if not isinstance(found, str) and not hasattr(found, 'to_string'):
            raise InvalidArgumentError("device=%.80r returned %.80r for the operation %s: expected "
                                       "a device's name, '' for none." % (function, found, op.name))
        return found
    return device


def static_batch_size(inputs, shares, remainder, called):
    """The batch size, checked as `split_batch` does, before any op is made; None where unknown."""
    check_choice('remainder', remainder, REMAINDERS)
    return _looked_at(inputs, shares, remainder, called)[2]


def _looked_at(inputs, shares, remainder, called):
    """(inputs with sparse tensors, their leaves, and what `_static_batch_size` returns)."""
    check_graph_mode('what split_batch makes')
    inputs = with_sparse_tensors(inputs)
    leaves = _leaves(inputs)
    _check_no_lists_of_numbers(inputs)
    static_size, unknown = _static_batch_size(leaves)
    _check_divides(static_size, shares, remainder, called,
                   not isinstance(inputs, NamedInputs))
    return inputs, leaves, static_size, unknown


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
    except TowersError:  # of the caller's device function
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_tensor(path, leaf, str(error).split('\n', 1)[0]) from None


def _no_tensor(path, leaf, because):
    return InputError('%s is a %s, which cannot be made a tensor of this graph: %s. Pass dense or '
                      'sparse tensors, or arrays of numbers or strings.'
                      % (path, type(leaf).__name__, because.rstrip('.')))


def _static_shape(path, leaf):
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
        shape = _static_shape(path, leaf)
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


def _check_divides(size, shares, remainder, called, may_drop):
    if size is None:
        return
    unit = sum(shares)
    if size == 0 or (remainder == 'drop' and size < unit):
        # One shard: before the number of towers is looked at.
        raise InputError('a batch of %d is too small%s: pass a batch of at least '
                         '%d.' % (size, ' for ' + _parts_text(shares, called)
                                  if unit > 1 else '', unit if remainder == 'drop' else 1))
    if remainder == 'error' and size % unit:
        # 'drop' leaves nothing of a batch that is smaller than the number of shards.
        raise InputError(
            "a batch of %d does not divide among %s: use a batch of %d, or remainder='weight' "
            '(uneven shards, weighted by their size)%s.' % (
                size, _parts_text(shares, called), unit * max(1, round(size / unit)),
                " or remainder='drop' (leave %d out)" % (size % unit)
                if may_drop and size > unit else ''))


def _parts_text(shares, called):
    return '%d %s%s' % (len(shares), called, '' if len(set(shares)) == 1 else
                        ' with shares %.60s' % ' : '.join(map(str, shares)))


def _size(tensor):
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    return tf.shape(tensor)[0]


def _plain(text):
    return text.replace("'", '')  # in an assertion TensorFlow puts backslashes before each quote


def _size_guards(tensors, leaves, static_size, unknown):
    """Assertions that the leaves without a static size have the size of the others."""
    return [tf.Assert(tf.equal(size, static_size), [
        _plain('towers: the first dimensions of the inputs differ: the others have %d and %s has'
               % (static_size, path)), size])
            for path, size in [(path, _size(tensor)) for tensor, (path, _) in zip(tensors, leaves)
                               if tensor is not None and path in unknown]]


def _dynamic_batch_size(tensors, leaves, shares, remainder, called, may_drop):
    """The batch size as a scalar, and the assertions to run before anything is cut."""
    sizes = [(path, _size(tensor))
             for tensor, (path, _) in zip(tensors, leaves) if tensor is not None]
    (first_path, size), others = sizes[0], sizes[1:]
    guards = [tf.Assert(tf.equal(size, other), [
        _plain('towers: the first dimensions of the inputs differ: %s and %s have'
               % (first_path, path)), size, other]) for path, other in others]
    unit, parts = sum(shares), _parts_text(shares, called)
    if remainder == 'error':
        guards.append(tf.Assert(tf.equal(size % unit, 0), [
            'towers: the batch does not divide among %s (remainder=weight would take it%s). '
            'Examples in it:' % (
                parts, ', and drop one that has an example for each' if may_drop else ''), size]))
    at_least = unit if remainder == 'drop' else 1
    guards.append(tf.Assert(tf.greater_equal(size, at_least), [
        'towers: a batch for %s needs at least %d examples and has' % (parts, at_least), size]))
    return size, guards


def _bounds(size, shares, remainder):
    """([(first example, number of examples)] a shard, number of examples used)."""
    unit, counts = sum(shares), []
    rounds = remainder == 'weight' and not (isinstance(size, int) and size % unit == 0)
    # Shards with the same share have the same tensor: `_cut` tells equal sizes by it.
    of_share = {share: size * share // unit if rounds else
                size // unit if share == 1 else size // unit * share for share in set(shares)}
    floors = [of_share[share] for share in shares]
    if rounds:
        rest = size - sum(floors)
        counts = [floor + (int(k < rest) if isinstance(rest, int) else
                           tf.cast(tf.less(k, rest), tf.int32)) for k, floor in enumerate(floors)]
    bounds, start = [], 0
    for count in counts or floors:
        bounds.append((start, count))
        start += count
    return bounds, size if rounds else size // unit * unit


def sizes_of_shards(size, shares, remainder):
    """How many of `size` examples each shard gets: a list of ints."""
    return [count for _, count in _bounds(size, shares, remainder)[0]]


def _weights(sizes, used, shares, remainder):
    is_static = all(isinstance(size, int) for size in sizes)
    if len(set(shares)) == 1 and remainder != 'weight' or len(sizes) == 1 or (
            is_static and len(set(sizes)) == 1):
        # One object for all: `is_even` tells a certainty from a coincidence by it.
        return [1. / len(sizes)] * len(sizes)
    if remainder != 'weight':
        return [share / sum(shares) for share in shares]
    if is_static:
        return [float(size) / used for size in sizes]
    return [tf.cast(size, tf.float64) / tf.cast(used, tf.float64) for size in sizes]


def _cut(tensor, bounds, keep, pad_empty):
    if isinstance(tensor, tf.SparseTensor):
        return [_sparse_shard(tensor, start, count, pad_empty) for start, count in bounds]
    counts = [count for _, count in bounds]
    if keep is not None:
        tensor = tensor[:keep]
    if all(isinstance(count, int) and count > 0 for count in counts):
        pieces = tf.split(tensor, counts)
    elif all(count is counts[0] for count in counts):
        pieces = tf.split(tensor, len(counts))
    else:
        pieces = [_dense_shard(tensor, start, count, pad_empty) for start, count in bounds]
    # Copies of one graph take all shards: where sizes differ, none is known to it.
    is_even = all(piece.shape.is_compatible_with(pieces[0].shape) for piece in pieces)
    return [tf.placeholder_with_default(piece, piece.shape if is_even else tf.TensorShape(
        [None]).concatenate(piece.shape[1:])) for piece in pieces]


def _dense_shard(tensor, start, count, pad_empty):
    if pad_empty:
        start, count = _first_example_if_empty(start, count)
    return tensor[start:start + count]


def _sparse_shard(tensor, start, count, pad_empty):
    if pad_empty:
        start, count = _first_example_if_empty(start, count)
    shape = tensor.dense_shape
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
    size = tf.concat([[tf.cast(count, tf.int64)], shape[1:]], 0)
    shard = tf.sparse.slice(tensor, begin, size)
    static = tensor.shape.as_list() if tensor.shape.ndims is not None else None
    return tf.SparseTensor(
        tf.placeholder_with_default(shard.indices, [None, static and len(static)]),
        tf.placeholder_with_default(shard.values, [None]),
        _sparse_shape(shard.dense_shape, static))


def _sparse_shape(shape, static):
    """The shape of a sparse shard, in which TensorFlow finds the dimensions that are static."""
    if static is None or all(size is None for size in static[1:]):
        return tf.placeholder_with_default(shape, [static and len(static)])
    return tf.concat([tf.placeholder_with_default(shape[:1], [1])]
                     + [shape[i:i + 1] if size is None else tf.constant([size], tf.int64)
                        for i, size in enumerate(static) if i], 0)


def _first_example_if_empty(start, count):
    if isinstance(count, int):
        return (start, count) if count else (0, 1)
    empty = tf.equal(count, 0)
    return tf.where(empty, tf.zeros_like(start), start), tf.maximum(count, 1)
