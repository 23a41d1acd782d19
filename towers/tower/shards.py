"""Cuts a batch into a shard per tower, on the CPU."""

import collections
import functools
import math
import numbers
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count, check_instance
from towers.errors import InputError, InvalidArgumentError
from towers.tower.batch_inputs import looked_at, size_and_guards, tensors_of

REMAINDERS = ('error', 'weight', 'drop')


class CutBatch(collections.namedtuple('CutBatch', 'inputs sizes weights batch_size is_even')):
    """A batch of `n` examples, cut into N shards.

    Attributes:
      inputs: list of N nests, each shaped like the whole one; every dense tensor of a shard is a
        `placeholder_with_default`, so that one tower can be fed by hand.
      sizes: list of N numbers of examples `n_k`: ints where the batch is static, else int32
        scalars.
      weights: list of N floats `n_k / n`, or float64 scalars. They sum to one.
      batch_size: `n`, counting only examples that are used: an int or an int32 scalar.
      is_even: whether it is certain that all shards have the same number of examples.
    """
    __slots__ = ()


def cut_batch(inputs, sizes, batch_size, is_even, shares=None):
    """The `CutBatch` of such inputs and sizes.

    Args:
      shares: the proportions of the sizes, where these are certain; else None.
    """
    count = len(sizes)
    if is_even:
        weights = [1. / count] * count
    elif shares is not None:
        weights = [share / sum(shares) for share in shares]
    else:
        weights = [size / batch_size if isinstance(size, int) else
                   tf.cast(size, tf.float64) / tf.cast(batch_size, tf.float64) for size in sizes]
    return CutBatch(inputs, sizes, weights, batch_size, is_even)


def split_batch(inputs: typing.Any, num_shards: int, remainder: str = 'error',
                called: str = 'towers',
                shares: typing.Optional[typing.Sequence[int]] = None) -> CutBatch:
    """Cuts every tensor of a nest along its first dimension, on the CPU.

    Args:
      inputs: a nest (tuple, list, dict, namedtuple) of dense or sparse tensors of any dtype, or
        of arrays or `tf.SparseTensorValue`s, each [n, …]. A None in it stays None in every shard.
      num_shards: N, the number of shards.
      remainder: what to do with a batch that N does not divide. `'error'`: an error, before any
        op is made where n is static, when the step runs where it is not. `'weight'`: the first
        `n mod N` shards get one example more, and `weights` says so. `'drop'`: the last
        `n mod N` examples are left out. With `'weight'` and n < N a shard without an example holds
        the batch's first one at weight 0, so that no mean over nothing (NaN) ever gets into a
        gradient or a moving average; `sizes` says 0 for it.
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
    """
    check_choice('remainder', remainder, REMAINDERS)
    check_count('num_shards', num_shards)
    num_shards = int(num_shards)
    check_instance('called', called, str, "a word such as 'towers'")
    shares = checked_shares(shares, num_shards)
    inputs = _checked(inputs, shares, remainder, called)
    with tf.name_scope('shards'), tf.device(None), tf.device('/cpu:0'):
        tensors = tensors_of(inputs)
        size, guards = size_and_guards(inputs, tensors)
        if inputs.size is None:
            guards += _size_assertions(size, shares, remainder, called)
        bounds, used = _bounds(size, shares, remainder)
        with tf.control_dependencies(guards):
            columns = [[None] * num_shards if tensor is None else
                       _cut(tensor, bounds, used if remainder == 'drop' else None)
                       for tensor in tensors]
    inputs_of_shards = [
        tf.nest.pack_sequence_as(inputs.nest, [column[k] for column in columns])
        for k in range(num_shards)]
    sizes = [count for _, count in bounds]
    is_even = len(set(shares)) == 1 and remainder != 'weight' or len(sizes) == 1 or (
        all(isinstance(size, int) for size in sizes) and len(set(sizes)) == 1)
    return cut_batch(inputs_of_shards, sizes, used, is_even,
                     None if remainder == 'weight' else shares)


def weighted(value, weight):
    """A value times the weight of its shard; 0 for a shard without an example, even of NaN."""
    return if_any(value * (weight if isinstance(weight, float) else tf.cast(weight, value.dtype)),
                  weight)


def if_any(value, weight):
    """The value of a shard that has an example, thus a weight; 0 of one that has none."""
    if isinstance(weight, float):
        return value if weight else tf.zeros_like(value)
    return tf.where_v2(weight > 0., value, tf.zeros_like(value))


def checked_shares(shares, count, called='shards'):
    """The proportions of the shards, without a common divisor: a tuple of `count` ints.

    Args:
      shares: `count` whole numbers, else `InvalidArgumentError`; None for equal parts.
      called: what they are the parts of, for the error's text.
    """
    if shares is None:
        return (1,) * count
    if not isinstance(shares, (tuple, list)) or len(shares) != count or not all(
            isinstance(share, numbers.Integral) and not isinstance(share, bool) and share > 0
            for share in shares):
        raise InvalidArgumentError('shares=%.80r for %d %s: expected a list with a whole number of '
                                   'at least 1 for each, such as %r.' % (
                                       shares, count, called, [3] + [1] * (count - 1)))
    divisor = functools.reduce(math.gcd, map(int, shares))
    return tuple(int(share) // divisor for share in shares)


def static_batch_size(inputs, shares, remainder, called):
    """The batch size, checked as `split_batch` does, before any op is made; None where unknown."""
    check_choice('remainder', remainder, REMAINDERS)
    return _checked(inputs, shares, remainder, called).size


def _checked(inputs, shares, remainder, called):
    inputs, unit = looked_at(inputs), sum(shares)
    size = inputs.size
    if size is None:
        return inputs
    if size == 0 or (remainder == 'drop' and size < unit):
        # The unit is 1 in the first check, which does not yet know how many towers there are.
        raise InputError('a batch of %d is too small%s: pass a batch of at least '
                         '%d.' % (size, ' for ' + _parts_text(shares, called)
                                  if unit > 1 else '', unit if remainder == 'drop' else 1))
    if remainder == 'error' and size % unit:
        # 'drop' leaves nothing of a batch that is smaller than the number of shards.
        raise InputError(
            "a batch of %d does not divide among %s: use a batch of %d, or remainder='weight' "
            '(uneven shards, weighted by their size)%s.' % (
                size, _parts_text(shares, called), unit * max(1, round(size / unit)),
                " or remainder='drop' (leave %d out)" % (size % unit) if size > unit else ''))
    return inputs


def _parts_text(shares, called):
    return '%d %s%s' % (len(shares), called, '' if len(set(shares)) == 1 else
                        ' with shares %.60s' % ' : '.join(map(str, shares)))


def _size_assertions(size, shares, remainder, called):
    """The assertions to run before a batch of a size that is not static is cut."""
    unit, parts = sum(shares), _parts_text(shares, called)
    at_least = unit if remainder == 'drop' else 1
    assertions = [tf.Assert(tf.greater_equal(size, at_least), [
        'towers: a batch for %s needs at least %d examples and has' % (parts, at_least), size])]
    if remainder == 'error':
        assertions.append(tf.Assert(tf.equal(size % unit, 0), [
            'towers: the batch does not divide among %s (remainder=weight would take it, and drop '
            'one that has an example for each). Examples in it:' % parts, size]))
    return assertions


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


def _cut(tensor, bounds, keep):
    if isinstance(tensor, tf.SparseTensor):
        return [sparse_shard(tensor, start, count) for start, count in bounds]
    counts = [count for _, count in bounds]
    if keep is not None:
        tensor = tensor[:keep]
    if all(isinstance(count, int) and count > 0 for count in counts):
        pieces = tf.split(tensor, counts)
    elif all(count is counts[0] for count in counts):
        pieces = tf.split(tensor, len(counts))
    else:
        pieces = [_dense_shard(tensor, start, count) for start, count in bounds]
    # Copies of one graph take all shards: where sizes differ, none is known to it.
    is_even = all(piece.shape.is_compatible_with(pieces[0].shape) for piece in pieces)
    return [dense_shard(piece, is_even) for piece in pieces]


def dense_shard(piece, is_even):
    """A shard that can be fed, of static size where all shards have one size."""
    return tf.placeholder_with_default(piece, piece.shape if is_even else tf.TensorShape(
        [None]).concatenate(piece.shape[1:]))


def _dense_shard(tensor, start, count):
    start, count = _first_example_if_empty(start, count)
    return tensor[start:start + count]


def sparse_shard(tensor, start, count):
    """A shard of a sparse tensor that can be fed: the examples from `start` on, `count` of them."""
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
