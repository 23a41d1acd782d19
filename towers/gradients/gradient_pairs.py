"""Gradients, dense or sparse, and lists of `(gradient, variable)` pairs.

Its test is `tests/reduce/test_sparse_rows.py`.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import source_through
from towers.graph.op_types import SAME_NUMBERS

Gradient = typing.Union[tf.Tensor, tf.IndexedSlices]
Pairs = typing.Iterable[typing.Tuple[typing.Optional[Gradient], tf.Variable]]
"""`(gradient, variable)` pairs. The gradient is None where the loss does not depend on the
variable."""


def listed_pairs(pairs: typing.Any) -> typing.Optional[typing.List[tuple]]:
    """An iterable of pairs, such as a `zip`, as a list of tuples; None for any other value."""
    try:
        listed = list(pairs)
    except (TypeError, RuntimeError):  # a `tf.data.Dataset` raises a `RuntimeError` in graph mode
        return None
    for pair in listed:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            return None
    return [tuple(pair) for pair in listed]


def gradients_of(pairs: Pairs) -> typing.List[typing.Optional[Gradient]]:
    """List of the gradients of `(gradient, variable)` pairs; some may be None."""
    return [gradient for gradient, _ in pairs]


def variables_of(pairs: Pairs) -> typing.List[tf.Variable]:
    """List of the variables of `(gradient, variable)` pairs."""
    return [variable for _, variable in pairs]


def tensors_of(pairs: Pairs) -> typing.List[tf.Tensor]:
    """List of the tensors of the gradients in `(gradient, variable)` pairs: a sparse gradient
    counts as its tensors, and None is left out."""
    tensors = tf.nest.flatten(gradients_of(pairs), expand_composites=True)
    return [tensor for tensor in tensors if tensor is not None]


def map_values(function: typing.Callable, gradient: Gradient) -> Gradient:
    """A gradient whose values are changed by a function. In an `IndexedSlices` the function changes
    the rows, and the row indices stay.

    Args:
      function: from a tensor to a tensor of the same shape.
      gradient: the gradient.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def times(gradient: Gradient, factor: typing.Union[float, tf.Tensor]) -> Gradient:
    """A gradient, dense or sparse, times a float or a scalar tensor, in the gradient's dtype."""
    if isinstance(factor, tf.Tensor):
        return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
    if factor == 1.:
        return gradient  # without an operation
    return map_values(lambda values: values * factor, gradient)


def multiplied(pairs: Pairs, factor: float) -> typing.List[tuple]:
    """List of the pairs with their gradients times a factor; None stays None."""
    result = []
    for gradient, variable in pairs:
        if gradient is not None:
            gradient = times(gradient, factor)
        result.append((gradient, variable))
    return result


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """A gradient, dense or sparse, converted to another dtype."""
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def may_be_gradient_of(gradient: typing.Any, variable: tf.Variable) -> bool:
    """Whether a value can be the gradient of a variable: it is None, or a tensor of the variable's
    graph, dtype and shape, dense or sparse."""
    if gradient is None:
        return True
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)):
        return False
    if gradient.graph is not variable.graph:
        return False
    if gradient.dtype.base_dtype != variable.dtype.base_dtype:
        return False
    shape = variable.get_shape()
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.shape.is_compatible_with(shape)
    if shape.ndims is None:  # no dimension can be cut off a shape whose rank is not known
        return True
    # The values are rows of the variable. TF 1.15 gives `IndexedSlices` no shape.
    return gradient.values.shape[1:].is_compatible_with(shape[1:])


def expected_gradient(variable: tf.Variable) -> str:
    """The shape and dtype that a gradient of a variable has to have, for the text of an error."""
    return ('expected a tensor or an IndexedSlices of this graph, of shape %s and dtype %s, or '
            'None' % (variable.get_shape(), variable.dtype.base_dtype.name))


# ---- rows of sparse gradients --------------------------------------------------------------------

class Lookup(typing.NamedTuple):
    """The rows of a sparse gradient that come from one lookup (`tf.gather`) in a variable."""
    slices: tf.IndexedSlices
    is_unique: bool  # whether no row of the variable occurs twice in `slices`


# {type of an operation: index of its output in which no number occurs twice}. The last three types
# are of later TensorFlows, in the gradient of `embedding_lookup_sparse`.
_UNIQUE = {'Range': 0, 'Unique': 0, 'UniqueV2': 0, 'UniqueWithCounts': 0, 'UniqueWithCountsV2': 0,
           'SparseSegmentSumGradV2': 1, 'SparseSegmentMeanGradV2': 1,
           'SparseSegmentSqrtNGradV2': 1}

_OF_NUMBERS_ALONE = ('Add', 'AddV2', 'Sub', 'FloorDiv', 'FloorMod')
"""Types of operations whose result depends on nothing but the numbers of two inputs."""


def lookups_of(slices: tf.IndexedSlices) -> typing.List[Lookup]:
    """List of the lookups that a sparse gradient's rows come from, at least one.

    If a model looks up rows of a variable several times, TensorFlow concatenates the rows of all
    these lookups. If any of the lookups has no row twice, they are split again here: so the sum
    over the towers can have each row of that lookup once, and keep the repeated rows of the others.
    If every lookup may have a row twice, one `Lookup` has all rows.
    """
    indices = slices.indices
    is_of_one_lookup = indices.op.type != 'ConcatV2'
    if is_of_one_lookup:
        return [Lookup(slices, has_no_index_twice(indices))]
    indices_by_lookup = indices_of_lookups(slices)
    are_unique = list(map(has_no_index_twice, indices_by_lookup))
    if not any(are_unique):
        return [Lookup(slices, is_unique=False)]
    lengths = [tf.shape(each)[0] for each in indices_by_lookup]
    values_by_lookup = tf.split(slices.values, lengths)
    lookups = []
    for values, lookup_indices, is_unique in zip(values_by_lookup, indices_by_lookup, are_unique):
        rows = tf.IndexedSlices(values, lookup_indices, slices.dense_shape)
        lookups.append(Lookup(rows, is_unique))
    return lookups


def indices_of_lookups(slices: tf.IndexedSlices) -> typing.List[tf.Tensor]:
    """List of the indices of each lookup that a sparse gradient's rows come from."""
    indices = slices.indices
    if indices.op.type != 'ConcatV2':
        return [indices]
    return list(indices.op.inputs)[:-1]  # the last input is the axis


def has_no_index_twice(indices: tf.Tensor) -> bool:
    """Whether the operations that compute indices show that no two of the indices are equal."""
    tensor = source_through(indices, SAME_NUMBERS)
    if tensor.op.type == 'DynamicPartition':  # places in one piece of a partitioned variable
        place, piece = tensor.op.inputs
        rows = _rows_at(place, piece)
        return rows is not None and has_no_index_twice(rows)
    if tensor.op.type == 'Const':  # such as the places of words in a text
        numbers = tf.get_static_value(tensor)
        return np.unique(numbers).size == numbers.size
    return _has_different_numbers(tensor)


def _has_different_numbers(tensor: tf.Tensor) -> bool:
    """Whether the type of a tensor's operation shows that no two of its numbers are equal."""
    return _UNIQUE.get(tensor.op.type) == tensor.value_index


def _rows_at(place: tf.Tensor, piece: tf.Tensor) -> typing.Optional[tf.Tensor]:
    """The row numbers of a lookup in a variable of several pieces, where the piece and the place of
    a row together tell its number. So different rows have different places in a piece.

    Args:
      place: the place of each row in its piece.
      piece: the number of each row's piece.

    Returns:
      The row numbers; None where places and pieces are not computed by one of `_STRATEGIES`.
    """
    for strategy in _STRATEGIES:
        found = {'piece': piece}
        if _has_form(piece, strategy.piece, found) and _has_form(place, strategy.place, found):
            return found['r']
    return None


class _Strategy(typing.NamedTuple):
    """How `tf.nn.embedding_lookup` distributes the rows r of a variable over its pieces, as two
    forms, see `_has_form`. In both of them `'piece'` stands for the number of the piece."""
    piece: tuple  # the form of the number of a row's piece
    place: tuple  # the form of the row's place in its piece


_STRATEGIES = (
    # 'mod': row r of n pieces is in the piece r % n, at the place r // n.
    _Strategy(piece=('FloorMod', 'r', 'n'),
              place=('FloorDiv', 'r', 'n')),
    # 'div': the first e pieces have k + 1 rows each, all other pieces k rows.
    #     piece = maximum(r // (k + 1), (r - e) // k)
    #     place = where(piece < e, r % (k + 1), (r - e) % k)
    _Strategy(piece=('Maximum',
                     ('FloorDiv', 'r', ('Add', 'k', 1)),
                     ('FloorDiv', ('Sub', 'r', 'e'), 'k')),
              place=('Select',
                     ('Less', 'piece', 'e'),
                     ('FloorMod', 'r', ('Add', 'k', 1)),
                     ('FloorMod', ('Sub', 'r', 'e'), 'k'))))


def _has_form(tensor: tf.Tensor, form: typing.Union[int, str, tuple],
              found: typing.Dict[str, tf.Tensor]) -> bool:
    """Whether a tensor is computed as a form says.

    Args:
      tensor: the tensor.
      form: a number, for a constant; a name, for any tensor, and for the same numbers wherever the
        name occurs; or a type of operation with a form for each of its inputs.
      found: {name: the tensor that it stands for}. The names that are not in it yet are added.
    """
    if isinstance(form, int):
        return np.array_equal(tf.get_static_value(tensor), form)
    if isinstance(form, str):
        return _is_same(tensor, found.setdefault(form, tensor))
    op_type, *forms_of_inputs = form
    op = source_through(tensor, SAME_NUMBERS).op
    if op.type not in (op_type, op_type + 'V2'):  # such as `AddV2`, which also adds
        return False
    return all(_has_form(given, expected, found)
               for given, expected in zip(op.inputs, forms_of_inputs))


def _are_same(tensors: typing.Sequence[tf.Tensor], others: typing.Sequence[tf.Tensor]) -> bool:
    """Whether two lists of tensors have the same length and, in order, the same numbers."""
    return len(tensors) == len(others) and all(map(_is_same, tensors, others))


def _is_same(tensor: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors have the same numbers. They are one tensor, or constants of one value; or
    operations of one type compute them from inputs with the same numbers: where a form has `r - e`
    in two places, the graph computes it twice."""
    tensor = source_through(tensor, SAME_NUMBERS)
    other = source_through(other, SAME_NUMBERS)
    if tensor.name == other.name:
        return True
    value = tf.get_static_value(tensor)
    other_value = tf.get_static_value(other)
    if value is not None and other_value is not None:
        return np.array_equal(value, other_value)
    is_one_way = tensor.op.type == other.op.type and tensor.op.type in _OF_NUMBERS_ALONE
    return is_one_way and _are_same(tensor.op.inputs, other.op.inputs)


def each_row_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same sparse gradient with each row once: `[(2, a), (5, b), (2, c)]` becomes
    `[(2, a + c), (5, b)]`.

    A kernel that applies repeated rows may add them up in any order, so that the result may have
    other bits.
    """
    # `place` has, for each row of the slices, the index of the row's number in `rows`.
    rows, place = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, place, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def rows_once(pairs: Pairs) -> typing.List[tuple]:
    """List of the same `(gradient, variable)` pairs, with `each_row_once` for sparse gradients."""
    result = []
    for gradient, variable in pairs:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = each_row_once(gradient)
        result.append((gradient, variable))
    return result
