"""A number of the graph, traced back to the constant that has it.

Of x [50, 12], `tf.reshape(x, [tf.shape(x)[0] * 3, 4])` has the shape [150, 4]. Its first number is
a product, and the first factor of the product is number 0 of the constant shape [50, 12]: there the
number comes from. Each step back takes a `Number`, in the result of an operation, to the `Number`
in the input of the operation from which it comes.

A number has to be `times` times the number of examples of a static batch, see `static_batch`: 150
is three times 50; one step back, in the first factor of `50 * 3`, it is once 50.

Words of other modules used here: `SAME_NUMBERS`: the types of the operations that give the numbers
of their first input, in another shape or type perhaps.

Its test is `tests/proof/test_static_batch.py`.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.op_types import SAME_NUMBERS


class Number(typing.NamedTuple):
    """A number that has to come from the size of the batch."""
    tensor: tf.Tensor  # a vector that has it, such as a shape; or a scalar
    place: int  # of the number in the vector
    times: int  # how many times the number of examples it has to be


def traced_to_constant(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in a constant from which a number comes; None where an operation on the way
    computes the number in a way that is not known."""
    while number.tensor.op.type != 'Const':
        step = _STEPS_BACK.get(number.tensor.op.type)
        source = None if step is None else step(number, batch_size)
        if source is None:
            return None
        number = source
    return number


def _before_same_numbers(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the input of an operation whose result has the numbers of its first input."""
    return number._replace(tensor=number.tensor.op.inputs[0])


def _before_index(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the vector from which an index takes it: for `shape[1]`, number 1 of
    `shape`."""
    op = number.tensor.op
    index = _index_into_vector(op)
    if index is None:
        return None
    return number._replace(tensor=op.inputs[0], place=index)


def _index_into_vector(op: tf.Operation) -> typing.Optional[int]:
    """The place from which a `StridedSlice` takes one number of a vector of static length: 1 for
    `shape[1]`, and for `shape[-1]` if `shape` has two numbers; None for any other slice."""
    begin = tf.get_static_value(op.inputs[1])
    length = op.inputs[0].shape.num_elements()
    # `shrink_axis_mask` 1: the first dimension, the only one of a vector, has an index.
    is_index = op.get_attr('shrink_axis_mask') == 1 and op.inputs[0].shape.ndims == 1
    if begin is None or not length or not is_index:
        return None
    return int(begin[0]) % length


def static_scalar(tensor: tf.Tensor) -> typing.Optional[np.ndarray]:
    """The value of a static scalar; None for another tensor.

    TensorFlow finds no static value for `tf.shape(x)[0]`, an index into a constant vector: it is
    taken from the vector here.
    """
    value = tf.get_static_value(tensor)
    if value is not None:
        return None if value.shape else value
    op = tensor.op
    if op.type in SAME_NUMBERS:
        return static_scalar(op.inputs[0])
    if op.type != 'StridedSlice':
        return None
    index = _index_into_vector(op)
    vector = tf.get_static_value(op.inputs[0])
    if index is None or vector is None:
        return None
    return vector[index]


def _before_slice(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the vector of which `tf.slice` takes a part; None where its begin is not
    static."""
    op = number.tensor.op
    begin = tf.get_static_value(op.inputs[1])
    if begin is None or op.inputs[0].shape.ndims != 1:
        return None
    return number._replace(tensor=op.inputs[0], place=number.place + int(begin[0]))


def _before_product(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The factor of a product of two scalars that comes from the number of examples; None where
    either factor could be the one, or neither.

    In 150 = 50 * 3, three times a batch of 50, the first factor is once the number of examples.
    """
    first, second = number.tensor.op.inputs
    from_first = _before_product_with(second, first, number, batch_size)
    from_second = _before_product_with(first, second, number, batch_size)
    if from_first is not None and from_second is not None:
        return None
    return from_first or from_second


def _before_product_with(constant: tf.Tensor, factor: tf.Tensor, number: Number,
                         batch_size: int) -> typing.Optional[Number]:
    """A factor of a product, as the number that comes from the number of examples; None where the
    factor would need another value to give the product.

    Args:
      constant: the other factor, a number that the examples have nothing to do with.
      factor: the factor.
      number: the product.
      batch_size: the static number of examples.
    """
    value_of_constant = static_scalar(constant)
    value = static_scalar(factor)
    if value_of_constant is None or value_of_constant < 1 or value is None:
        return None
    times = number.times // int(value_of_constant)
    is_exact = number.times % value_of_constant == 0 and value == times * batch_size
    return number._replace(tensor=factor, times=times) if is_exact else None


def _before_stack(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The scalar that is the number in a stack of scalars: n, for number 0 of
    `tf.stack([n, 4])`."""
    op = number.tensor.op
    if op.inputs[0].shape.ndims != 0:
        return None
    return number._replace(tensor=op.inputs[number.place], place=0)


def _before_concat(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the vector that brings it into a concatenation: in the vector [n], for number 0
    of `tf.concat([[n], [4]], 0)`."""
    place = number.place
    vectors = list(number.tensor.op.inputs)[:-1]  # the last input is the axis
    for vector in vectors:
        length = vector.shape.num_elements()
        if length is None:
            return None
        if place < length:
            return number._replace(tensor=vector, place=place)
        place -= length
    return None


def _before_split(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the vector of which `tf.split` makes parts of given lengths: n, of the part
    (n) of (n, 4). None where the length of a part before this one is not static."""
    op = number.tensor.op
    parts_before = op.outputs[:number.tensor.value_index]
    lengths = [part.shape.num_elements() for part in parts_before]
    if op.inputs[0].shape.ndims != 1 or None in lengths:
        return None
    return number._replace(tensor=op.inputs[0], place=number.place + sum(lengths))


def _before_brackets(number: Number, batch_size: int) -> typing.Optional[Number]:
    """The number in the vector of which brackets take an index or a range: for `shape[1]`, or
    number 0 of `shape[1:]`, number 1 of `shape`."""
    op = number.tensor.op
    if op.get_attr('shrink_axis_mask'):
        return _before_index(number, batch_size)
    begin = _begin_of_range(op)
    if begin is None or op.inputs[0].shape.ndims != 1:
        return None
    return number._replace(tensor=op.inputs[0], place=begin + number.place)


def _begin_of_range(op: tf.Operation) -> typing.Optional[int]:
    """The place at which a range in brackets begins: 1 for `shape[1:]`. None for a range that
    begins at a place from the end, has a step, or is not static."""
    begin = tf.get_static_value(op.inputs[1])
    strides = tf.get_static_value(op.inputs[3])
    if begin is None or strides is None or not has_item_for_each_dimension(op):
        return None
    first = 0 if op.get_attr('begin_mask') else int(begin[0])
    if first < 0 or strides[0] != 1:
        return None
    return first


def has_item_for_each_dimension(op: tf.Operation) -> bool:
    """Whether item i in the brackets of a `StridedSlice` is for dimension i: not where an item
    before it is `tf.newaxis` or `...`."""
    return not (op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask'))


_STEPS_BACK: typing.Dict[str, typing.Callable] = dict(
    {name: _before_same_numbers for name in SAME_NUMBERS},
    StridedSlice=_before_brackets, Slice=_before_slice, SplitV=_before_split, Mul=_before_product,
    Pack=_before_stack, ConcatV2=_before_concat)
"""{type of an operation: the function (a number in its result, size of the batch) -> the number in
its inputs that it comes from, or None}"""
