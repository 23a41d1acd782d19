"""Cuts a batch into a shard per tower, on the CPU."""

import functools
import itertools
import math
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count, is_whole_number
from towers.errors import InputError, InvalidArgumentError
from towers.placement.devices import MOST_TOWERS
from towers.placement.variable_device import only_device
from towers.shards.batch_inputs import (
    Inputs,
    checked_inputs,
    size_and_guards,
    tensors_of_leaves,
)

REMAINDERS = ('error', 'weight', 'drop')
"""What is done with a batch that the towers do not divide: an error; or shards differ by an
example, and a shard without an example holds padding; or the last examples are left out."""

Size = typing.Union[int, tf.Tensor]
"""A number of examples: an int, or an int32 scalar if it is not static."""


class CutBatch(typing.NamedTuple):
    """A batch of `n` examples, cut into N shards.

    Attributes:
      inputs: list of N nests like the whole one; every dense tensor of a shard is a
        `placeholder_with_default`, so that one tower can be fed by hand.
      sizes: list of N numbers of examples `n_k`: ints, or int32 scalars if not static.
      weights: list of N floats `n_k / n`, or float64 scalars. They sum to one.
      batch_size: `n`, counting only examples that are used: an int or an int32 scalar.
      is_even: whether it is certain that all shards have the same number of examples.
      pads: whether there may be a shard without an example, which holds padding.
    """
    inputs: typing.List[typing.Any]
    sizes: typing.List[Size]
    weights: typing.List[typing.Union[float, tf.Tensor]]
    batch_size: Size
    is_even: bool
    pads: bool


def split_batch(inputs: typing.Any, num_shards: int, remainder: str = 'error',
                shares: typing.Optional[typing.Sequence[int]] = None) -> CutBatch:
    """Cuts every tensor of a nest along its first dimension, on the CPU.

    Args:
      inputs: a nest (tuple, list, dict, namedtuple) of dense or sparse tensors of any dtype, or
        of arrays, each [n, …]. A None in it stays None in every shard.
      num_shards: N, the number of shards.
      remainder: the treatment of a batch that N does not divide. `'error'`: an error, before any
        op is made if n is static, else when the step runs. `'weight'`: the first
        `n mod N` shards get one example more, and `weights` says so. `'drop'`: the last
        `n mod N` examples are left out. With `'weight'` and n < N a shard without an example holds
        the batch's first one at weight 0, so that no mean over nothing (NaN) ever gets into a
        gradient or a moving average; `sizes` says 0 for it.
      shares: the proportions of the shards, N whole numbers: `[3, 1]` cuts 400 examples into 300
        and 100. None: equal parts.

    Returns:
      `CutBatch`. The examples keep their order: shard 0 has the first examples.

    Raises:
      InputError: no tensor at all, a scalar, first dimensions that differ, a batch that does not
        divide, an unsupported type, a tensor of another graph.
      InvalidArgumentError: an unknown `remainder`; no number of shards; `shares` that are not N
        whole numbers.
    """
    check_count('num_shards', num_shards, most=MOST_TOWERS)
    return cut(inputs, checked_shares(shares, int(num_shards)), remainder)


def cut(inputs: typing.Any, shares: typing.Tuple[int, ...], remainder: str,
        word_for_parts: str = 'towers') -> CutBatch:
    """Cuts a batch into parts; see `split_batch`.

    Args:
      inputs, remainder: the arguments of `split_batch`.
      shares: the proportions of the parts, see `checked_shares`.
      word_for_parts: what errors call the parts: `'towers'` or `'micro-batches'`.
    """
    checked = checked_size(inputs, shares, remainder, word_for_parts)
    with tf.name_scope('shards'), only_device('/cpu:0'):
        tensors = tensors_of_leaves(checked.leaves)
        size, guards = size_and_guards(checked, tensors)
        if checked.size is None:
            guards += _size_assertions(size, shares, remainder, word_for_parts)
        sizes, used_size = sizes_of_shards(size, shares, remainder)
        pieces_of_leaves = []  # for each leaf, its piece in each shard
        with tf.control_dependencies(guards):
            for tensor in tensors:
                used_part = tensor
                if remainder == 'drop':
                    used_part = _first_examples(tensor, used_size)
                pieces_of_leaves.append(_pieces(used_part, sizes, name_of_shard(tensor)))
        shards = [tf.nest.pack_sequence_as(inputs, pieces) for pieces in zip(*pieces_of_leaves)]
        is_even = _are_certainly_equal(sizes, shares, remainder)
        if remainder == 'weight':
            # The first shards may have an example more than their share. The last shards are
            # empty, and hold padding, in a batch with fewer examples than shards.
            return cut_batch(shards, sizes, used_size, is_even, shares=None, pads=True)
        return cut_batch(shards, sizes, used_size, is_even, shares)


def _first_examples(tensor: typing.Union[None, tf.Tensor, tf.SparseTensor],
                    size: Size) -> typing.Union[None, tf.Tensor, tf.SparseTensor]:
    """The first examples of a leaf, which are to be cut into shards: `_dense_pieces` may split the
    whole tensor that it gets. A sparse tensor stays as it is, since each of its shards is a slice.

    Args:
      tensor: the leaf.
      size: how many examples.
    """
    if isinstance(tensor, tf.Tensor):
        return tensor[:size]
    return tensor


def _are_certainly_equal(sizes: list, shares: typing.Tuple[int, ...], remainder: str) -> bool:
    """Whether all shards have the same size, whatever the size of the batch.

    Args:
      sizes: the sizes of the shards.
      shares: the proportions of the sizes.
      remainder: one of `REMAINDERS`.
    """
    if len(sizes) == 1:
        return True
    have_equal_shares = len(set(shares)) == 1
    # With 'weight' the first shards may get an example more.
    if have_equal_shares and remainder != 'weight':
        return True
    return _are_static(sizes) and len(set(sizes)) == 1


def _are_static(sizes: list) -> bool:
    """Whether all sizes are known before the step."""
    return all(isinstance(size, int) for size in sizes)


def cut_batch(inputs: list, sizes: list, batch_size: Size, is_even: bool,
              shares: typing.Optional[typing.Tuple[int, ...]] = None,
              pads: bool = False) -> CutBatch:
    """Makes a `CutBatch` from shards, with their weights.

    A weight is the shard's size over the batch's size. Where the proportions of the sizes are
    known, the weight is a float even if the sizes are not static: 1/4 for each of 4 equal shards.

    Args:
      inputs, sizes, batch_size, is_even, pads: the attributes of `CutBatch`.
      shares: the proportions of the sizes; None where they are not known before the step.
    """
    if is_even:
        shares = (1,) * len(sizes)
    if shares is None:
        weights = [_quotient(size, batch_size) for size in sizes]
    else:
        weights = [share / sum(shares) for share in shares]
    return CutBatch(inputs, sizes, weights, batch_size, is_even, pads)


def _quotient(size: Size, batch_size: Size) -> typing.Union[float, tf.Tensor]:
    """The weight of a shard, size over batch size: a float, or a float64 scalar."""
    if isinstance(size, int):
        return size / batch_size
    return tf.cast(size, tf.float64) / tf.cast(batch_size, tf.float64)


def weighted(value: tf.Tensor, weight: typing.Union[float, tf.Tensor]) -> tf.Tensor:
    """A value times the weight of its shard. For a shard without an example it is 0, even if the
    value is NaN."""
    factor = weight if isinstance(weight, float) else tf.cast(weight, value.dtype)
    return zero_if_empty(value * factor, weight)


def zero_if_empty(value: tf.Tensor, weight: typing.Union[float, tf.Tensor]) -> tf.Tensor:
    """A value of a shard; 0 in its place if the shard has no example, and so the weight 0."""
    if isinstance(weight, float):  # it is known before the step
        has_examples = weight > 0.
        return value if has_examples else tf.zeros_like(value)
    return tf.where_v2(weight > 0., value, tf.zeros_like(value))


def is_always_empty(weight: typing.Union[float, tf.Tensor]) -> bool:
    """Whether a shard of this weight has no example in any step, but padding. A weight that is a
    tensor depends on the batch of the step."""
    return isinstance(weight, float) and weight == 0.


def checked_shares(shares: typing.Any, count: int,
                   word_for_parts: str = 'shards') -> typing.Tuple[int, ...]:
    """Checks the proportions of the parts of a batch, and divides them by their greatest common
    divisor.

    Args:
      shares: a list or tuple with a whole number of at least 1 for each part; or None.
      count: how many parts there are.
      word_for_parts: what errors call the parts.

    Returns:
      The smallest whole numbers in the same proportions: `(3, 1)` for `[6, 2]`, 1s for None.

    Raises:
      InvalidArgumentError: `shares` is something else.
    """
    if shares is None:
        return (1,) * count
    is_list = isinstance(shares, (tuple, list)) and len(shares) == count
    if not is_list or not all(map(_is_positive, shares)):
        raise InvalidArgumentError('shares=%.80r for %d %s: expected a list with a whole number of '
                                   'at least 1 for each, such as %r.' % (
                                       shares, count, word_for_parts, [3] + [1] * (count - 1)))
    divisor = functools.reduce(math.gcd, map(int, shares))
    return tuple(int(share) // divisor for share in shares)


def _is_positive(share: typing.Any) -> bool:
    """Whether a share is a whole number of at least 1."""
    return is_whole_number(share) and int(share) > 0


def checked_size(inputs: typing.Any, shares: typing.Tuple[int, ...], remainder: str,
                 word_for_parts: str) -> Inputs:
    """Checks that a batch can be cut, as far as its static size tells; makes no operation.

    Args:
      inputs, shares, remainder, word_for_parts: the arguments of `cut`.

    Returns:
      The `Inputs` of the batch.
    """
    check_choice('remainder', remainder, REMAINDERS)
    checked = checked_inputs(inputs)
    size = checked.size
    if size is None:  # `_size_assertions` check it in each step
        return checked
    parts = _parts_text(shares, word_for_parts)
    least = _least_size(shares, remainder)
    if size < least:
        raise InputError('a batch of %d is too small for %s: pass a batch of at least %d.' % (
            size, parts, least))
    if remainder == 'error':
        _check_divides(size, sum(shares), parts)
    return checked


def _check_divides(size: int, unit: int, parts: str) -> None:
    """Raises `InputError` for a batch that does not divide among its parts.

    Args:
      size: the number of examples.
      unit: a batch divides if its size is a multiple of this, the sum of the parts' shares.
      parts: the error's text about the parts.
    """
    num_left = size % unit
    if num_left == 0:
        return
    or_drop = ''
    if size > unit:  # with 'drop', a smaller batch would leave no example for some part
        or_drop = " or remainder='drop' (leave %d out)" % num_left
    nearest = unit * max(1, round(size / unit))
    raise InputError(
        "a batch of %d does not divide among %s: use a batch of %d, or remainder='weight' "
        '(uneven shards, weighted by their size)%s.' % (size, parts, nearest, or_drop))


def _least_size(shares: typing.Tuple[int, ...], remainder: str) -> int:
    """The least number of examples that a batch may have, by the arguments of `cut`."""
    if remainder == 'drop':
        return sum(shares)  # in a smaller batch some shard would have no example
    # With 'weight' a shard without an example is padded. With 'error', a batch that does not divide
    # has an error of its own.
    return 1


def _parts_text(shares: typing.Tuple[int, ...], word_for_parts: str) -> str:
    """The parts of the batch for an error: `'4 towers'`, `'2 towers with shares 3 : 1'`."""
    text = '%d %s' % (len(shares), word_for_parts)
    if len(set(shares)) > 1:
        text += ' with shares %.60s' % ' : '.join(map(str, shares))
    return text


def _size_assertions(size: tf.Tensor, shares: typing.Tuple[int, ...], remainder: str,
                     word_for_parts: str) -> typing.List[tf.Operation]:
    """Makes the assertions that run before a batch of unknown static size is cut.

    Args:
      size: the number of examples, int32 scalar.
      shares, remainder, word_for_parts: the arguments of `cut`.
    """
    parts = _parts_text(shares, word_for_parts)
    least = _least_size(shares, remainder)
    assertions = [tf.Assert(tf.greater_equal(size, least), [
        'towers: a batch for %s needs at least %d examples and has' % (parts, least), size])]
    if remainder == 'error':
        assertions.append(tf.Assert(tf.equal(size % sum(shares), 0), [
            'towers: the batch does not divide among %s (remainder=weight takes it, remainder=drop '
            'if it has an example for each). Its number of examples:' % parts, size]))
    return assertions


class ShardSizes(typing.NamedTuple):
    """The numbers of examples of shards."""
    sizes: list  # of each shard
    used_size: Size  # the sum of these: without the remainder that no shard has


def sizes_of_shards(size: Size, shares: typing.Tuple[int, ...], remainder: str) -> ShardSizes:
    """Divides the examples of a batch among its shards.

    With `remainder='weight'` every example is in a shard: a remainder goes to the first shards, one
    example each (10 examples for 4 towers: 3, 3, 2, 2). With `'drop'` the remainder is in no shard
    (2, 2, 2, 2); with `'error'` there is no remainder.

    Args:
      size: the number of examples.
      shares: the proportions of the shards.
      remainder: one of `REMAINDERS`.
    """
    unit = sum(shares)  # each multiple of it divides among the shards
    may_have_remainder = not isinstance(size, int) or size % unit != 0
    if remainder == 'weight' and may_have_remainder:
        return ShardSizes(_sizes_with_remainder(size, shares), size)
    size_per_share = size // unit
    if unit == len(shares):  # all shares are 1
        # All sizes are one and the same tensor: by this `_dense_pieces` knows that they are equal.
        sizes = [size_per_share] * len(shares)
    else:
        sizes = [size_per_share * share for share in shares]
    return ShardSizes(sizes, size_per_share * unit)


def _sizes_with_remainder(size: Size, shares: typing.Tuple[int, ...]) -> list:
    """The sizes of shards that hold all examples of a batch. Each shard gets its share, rounded
    down; the examples left over go to the first shards, one each: 10 for 4 equal shards are
    3, 3, 2, 2.

    Args:
      size: the number of examples.
      shares: the proportions of the shards.
    """
    floors = [size * share // sum(shares) for share in shares]
    num_left = size - sum(floors)
    sizes = []
    for index, floor in enumerate(floors):
        sizes.append(floor + _one_if_below(index, num_left))
    return sizes


def _one_if_below(number: int, limit: Size) -> Size:
    """1 if a number is below a limit, else 0."""
    if isinstance(limit, int):
        return int(number < limit)
    return tf.cast(tf.less(number, limit), tf.int32)


def name_of_shard(tensor: typing.Union[None, tf.Tensor, tf.SparseTensor]) -> typing.Optional[str]:
    """The name of a tensor's shards in their name scope: the name of the tensor, without its
    scopes, so that an error about a shard names the program's own input. None for a sparse tensor,
    and for None."""
    if not isinstance(tensor, tf.Tensor):
        return None
    return tensor.op.name.split('/')[-1]


def _pieces(tensor: typing.Union[None, tf.Tensor, tf.SparseTensor], sizes: list,
            name: typing.Optional[str]) -> list:
    """List of the pieces of one leaf of the inputs, a piece of each size, which can be fed; a list
    of Nones for None.

    Args:
      tensor: the leaf.
      sizes: the sizes of the pieces.
      name: see `name_of_shard`.
    """
    if tensor is None:
        return [None] * len(sizes)
    starts = list(itertools.accumulate([0] + sizes[:-1]))  # the number of each first example
    if isinstance(tensor, tf.SparseTensor):
        return [sparse_shard(tensor, start, size) for start, size in zip(starts, sizes)]
    pieces = _dense_pieces(tensor, starts, sizes)
    # The other towers are copies of tower 0's graph with its static shapes: tower 0's shard may
    # have a static size only if that is the size of all shards.
    have_one_shape = all(piece.shape.is_compatible_with(pieces[0].shape) for piece in pieces)
    return [dense_shard(piece, has_static_size=have_one_shape, name=name) for piece in pieces]


def _dense_pieces(tensor: tf.Tensor, starts: list, sizes: list) -> typing.List[tf.Tensor]:
    """The pieces of a dense tensor.

    One `tf.split` is the cheapest cut, but it neither takes sizes that only the step knows, unless
    they are equal, nor gives a shard without an example its padding.

    Args:
      tensor: the tensor.
      starts: the number of the first example of each shard.
      sizes: the sizes of the shards.
    """
    if _are_static(sizes) and min(sizes) > 0:
        return tf.split(tensor, sizes)
    are_equal = all(size is sizes[0] for size in sizes)  # one tensor, see `sizes_of_shards`
    if are_equal:
        return tf.split(tensor, len(sizes))
    pieces = []
    for start, size in zip(starts, sizes):
        held = _held_examples(start, size)
        pieces.append(tensor[held.start:held.start + held.size])
    return pieces


def dense_shard(piece: tf.Tensor, has_static_size: bool, name: typing.Optional[str]) -> tf.Tensor:
    """Makes a shard that can be fed, a `placeholder_with_default`, of the examples in it.

    Args:
      piece: the examples of the shard.
      has_static_size: whether the shard's static shape has the number of its examples; else the
        shape has None there.
      name: see `name_of_shard`.
    """
    shape = piece.shape
    if not has_static_size:
        shape = tf.TensorShape([None]).concatenate(piece.shape[1:])
    return tf.placeholder_with_default(piece, shape, name)


def sparse_shard(tensor: tf.SparseTensor, start: Size, size: Size) -> tf.SparseTensor:
    """Makes a shard of a sparse tensor: `size` examples, from number `start` on.

    It can be fed: its indices, values and shape are each a `placeholder_with_default`.
    """
    held = _held_examples(start, size)
    dense_shape = tensor.dense_shape
    first_entry = tf.concat([[tf.cast(held.start, tf.int64)], tf.zeros_like(dense_shape[1:])], 0)
    shape_of_slice = tf.concat([[tf.cast(held.size, tf.int64)], dense_shape[1:]], 0)
    shard = tf.sparse.slice(tensor, first_entry, shape_of_slice)
    rank = tensor.shape.ndims
    fed_shape = tf.placeholder_with_default(shard.dense_shape, [rank])
    if rank is not None:
        fed_shape = _with_static_dimensions(fed_shape, tensor.shape.as_list())
    return tf.SparseTensor(
        tf.placeholder_with_default(shard.indices, [None, rank]),
        tf.placeholder_with_default(shard.values, [None]), fed_shape)


def _with_static_dimensions(shape: tf.Tensor, static_sizes: list) -> tf.Tensor:
    """The same dense shape of a sparse tensor, with constants for its static dimensions.

    TensorFlow takes the static shape of a sparse tensor from the constants in its dense shape. With
    a placeholder as the dense shape, nothing would be known of a shard's shape.

    Args:
      shape: the dense shape, an int64 vector.
      static_sizes: the static size of each dimension, or None. The first dimension, of the
        examples, stays as it is.
    """
    has_static_dimension = any(static_sizes[1:])
    if not has_static_dimension:
        return shape
    dimensions = [shape[:1]]
    for axis, size in enumerate(static_sizes[1:], start=1):
        if size is None:
            dimensions.append(shape[axis:axis + 1])
        else:
            dimensions.append(tf.constant([size], tf.int64))
    return tf.concat(dimensions, 0)


class _HeldExamples(typing.NamedTuple):
    """The examples of the batch that a shard holds: `size` of them, from number `start` on."""
    start: Size
    size: Size


def _held_examples(start: Size, size: Size) -> _HeldExamples:
    """The examples that a shard holds: its own examples; if it has none, the batch's first example,
    as padding.

    Args:
      start: the number of the first example of the shard.
      size: how many examples the shard has; perhaps 0.
    """
    if isinstance(size, int):
        has_examples = size > 0
        return _HeldExamples(start, size) if has_examples else _HeldExamples(0, 1)
    is_empty = tf.equal(size, 0)
    return _HeldExamples(tf.where(is_empty, tf.zeros_like(start), start), tf.maximum(size, 1))
