"""Cuts a batch into a shard per tower, on the CPU."""

import collections
import functools
import itertools
import math
import numbers
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count
from towers.errors import InputError, InvalidArgumentError
from towers.placement.devices import MOST_TOWERS
from towers.shards.batch_inputs import checked_inputs, size_and_guards, tensors_of_leaves

REMAINDERS = ('error', 'weight', 'drop')
"""The treatment of a batch that the towers do not divide: an error; or shards differ by an example,
and one without an example holds padding; or the last examples are left out."""


class CutBatch(collections.namedtuple('CutBatch', [
        'inputs', 'sizes', 'weights', 'batch_size', 'is_even', 'pads'])):
    """A batch of `n` examples, cut into N shards.

    Attributes:
      inputs: list of N nests like the whole one; every dense tensor of a shard is a
        `placeholder_with_default`, so that one tower can be fed by hand.
      sizes: list of N numbers of examples `n_k`: ints, or int32 scalars if not static.
      weights: list of N floats `n_k / n`, or float64 scalars. They sum to one.
      batch_size: `n`, counting only examples that are used: an int or an int32 scalar.
      is_even: whether it is certain that all shards have the same number of examples.
      pads: whether a shard without an example holds padding.
    """
    __slots__ = ()


def split_batch(inputs: typing.Any, num_shards: int, remainder: str = 'error',
                shares: typing.Optional[typing.Sequence[int]] = None) -> CutBatch:
    """Cuts every tensor of a nest along its first dimension, on the CPU.

    Args:
      inputs: a nest (tuple, list, dict, namedtuple) of dense or sparse tensors of any dtype, or
        of arrays, each [n, …]. A None in it stays None in every shard.
      num_shards: N, the number of shards.
      remainder: the treatment of a batch that N does not divide. `'error'`: an error, before any
        op is made where n is static, when the step runs where it is not. `'weight'`: the first
        `n mod N` shards get one example more, and `weights` says so. `'drop'`: the last
        `n mod N` examples are left out. With `'weight'` and n < N a shard without an example holds
        the batch's first one at weight 0, so that no mean over nothing (NaN) ever gets into a
        gradient or a moving average; `sizes` says 0 for it.
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
    check_count('num_shards', num_shards, most=MOST_TOWERS)
    return cut(inputs, checked_shares(shares, int(num_shards)), remainder)


def cut(inputs, shares, remainder, called='towers'):
    """The `CutBatch` of `split_batch`, whose errors call the parts 'towers', or 'micro-batches'."""
    checked, pads = checked_size(inputs, shares, remainder, called), remainder == 'weight'
    with tf.name_scope('shards'), tf.device(None), tf.device('/cpu:0'):
        tensors = tensors_of_leaves(checked.leaves)
        size, guards = size_and_guards(checked, tensors)
        if checked.size is None:
            guards += _size_assertions(size, shares, remainder, called)
        sizes, used = sizes_of_shards(size, shares, remainder)
        with tf.control_dependencies(guards):
            columns = [[None] * len(sizes) if tensor is None else _pieces(
                tensor, sizes, used if remainder == 'drop' else None) for tensor in tensors]
        is_static = all(isinstance(each, int) for each in sizes)
        is_even = len(set(shares)) == 1 and not pads or len(sizes) == 1 or (
            is_static and len(set(sizes)) == 1)
        return cut_batch([tf.nest.pack_sequence_as(inputs, each) for each in zip(*columns)],
                          sizes, used, is_even, None if pads else shares, pads)


def cut_batch(inputs, sizes, batch_size, is_even, shares=None, pads=False):
    """The `CutBatch`; `shares` are the proportions of the sizes, where these are certain."""
    shares = (1,) * len(sizes) if is_even else shares
    if shares is not None:
        # Equal weights are one object, by which they are known to be equal.
        of_share = {share: share / sum(shares) for share in shares}
        weights = [of_share[share] for share in shares]
    else:
        weights = [size / batch_size if isinstance(size, int) else
                   tf.cast(size, tf.float64) / tf.cast(batch_size, tf.float64) for size in sizes]
    return CutBatch(inputs, sizes, weights, batch_size, is_even, pads)


def weighted(value, weight):
    """A value times the weight of its shard; 0 for a shard without an example, even of NaN."""
    factor = weight if isinstance(weight, float) else tf.cast(weight, value.dtype)
    return zero_if_empty(value * factor, weight)


def zero_if_empty(value, weight):
    """The value of a shard that has an example, thus a weight; 0 for a shard without an example."""
    if isinstance(weight, float):
        return value if weight else tf.zeros_like(value)
    return tf.where_v2(weight > 0., value, tf.zeros_like(value))


def checked_shares(shares, count, called='shards'):
    """The proportions of `count` parts without a common divisor: a tuple of ints; 1s for None."""
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


def checked_size(inputs, shares, remainder, called):
    """The `Inputs` of a batch whose static size can be cut so; makes no operation."""
    check_choice('remainder', remainder, REMAINDERS)
    checked, unit = checked_inputs(inputs), sum(shares)
    size, least = checked.size, unit if remainder == 'drop' else 1
    if size is not None and size < least:
        raise InputError('a batch of %d is too small for %s: pass a batch of at least %d.' % (
            size, _parts_text(shares, called), least))
    if remainder == 'error' and size is not None and size % unit:
        raise InputError(
            "a batch of %d does not divide among %s: use a batch of %d, or remainder='weight' "
            '(uneven shards, weighted by their size)%s.' % (
                size, _parts_text(shares, called), unit * max(1, round(size / unit)),
                " or remainder='drop' (leave %d out)" % (size % unit) if size > unit else ''))
    return checked


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
            'towers: the batch does not divide among %s (remainder=weight takes it, remainder=drop '
            'if it has an example for each). Its number of examples:' % parts, size]))
    return assertions


def sizes_of_shards(size, shares, remainder):
    """(list of the numbers of examples of the shards, number of examples used), of `size`."""
    unit = sum(shares)
    if remainder == 'weight' and not (isinstance(size, int) and size % unit == 0):
        floors = [size * share // unit for share in shares]
        rest = size - sum(floors)
        return [floor + (int(k < rest) if isinstance(rest, int) else
                         tf.cast(tf.less(k, rest), tf.int32))
                for k, floor in enumerate(floors)], size
    each = size // unit
    return [each if share == 1 else each * share for share in shares], each * unit


def _pieces(tensor, sizes, used):
    """A tensor in pieces of these sizes; with `used`, of that many of its first examples."""
    starts = list(itertools.accumulate([0] + sizes[:-1]))
    if isinstance(tensor, tf.SparseTensor):
        return [sparse_shard(tensor, *each) for each in zip(starts, sizes)]
    if used is not None:
        tensor = tensor[:used]
    if all(isinstance(size, int) and size > 0 for size in sizes):
        pieces = tf.split(tensor, sizes)
    elif all(size is sizes[0] for size in sizes):
        pieces = tf.split(tensor, len(sizes))
    else:
        pieces = [tensor[start:start + size] for start, size in map(
            _first_example_if_empty, starts, sizes)]
    # Copies of one graph take all shards: where sizes differ, the graph knows no size.
    is_even = all(piece.shape.is_compatible_with(pieces[0].shape) for piece in pieces)
    return [dense_shard(piece, is_even) for piece in pieces]


def dense_shard(piece, is_even):
    """A shard that can be fed, of static size where all shards have one size."""
    return tf.placeholder_with_default(piece, piece.shape if is_even else tf.TensorShape(
        [None]).concatenate(piece.shape[1:]))


def sparse_shard(tensor, start, count):
    """A shard of a sparse tensor that can be fed: the examples from `start` on, `count` of them."""
    start, count = _first_example_if_empty(start, count)
    shape = tensor.dense_shape
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
    size = tf.concat([[tf.cast(count, tf.int64)], shape[1:]], 0)
    shard = tf.sparse.slice(tensor, begin, size)
    static = tensor.shape.as_list() if tensor.shape.ndims is not None else None
    shape = tf.placeholder_with_default(shard.dense_shape, [static and len(static)])
    if static is not None and any(static[1:]):  # TensorFlow finds the static dimensions in it
        shape = tf.concat([shape[:1]] + [
            shape[i:i + 1] if size is None else tf.constant([size], tf.int64)
            for i, size in enumerate(static) if i], 0)
    return tf.SparseTensor(
        tf.placeholder_with_default(shard.indices, [None, static and len(static)]),
        tf.placeholder_with_default(shard.values, [None]), shape)


def _first_example_if_empty(start, count):
    if isinstance(count, int):
        return (start, count) if count else (0, 1)
    empty = tf.equal(count, 0)
    return tf.where(empty, tf.zeros_like(start), start), tf.maximum(count, 1)
