"""Inputs that are cut into shards before the build: `Shards`, by the caller; `staged`, ahead.

For `staged` TensorFlow's own `MultiDeviceIterator` reads ahead: while the towers compute one step,
the shards of the next are copied to their devices.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count, check_instance
from towers.errors import InputError
from towers.placement.devices import check_one_stage, resolve_devices, short_name
from towers.placement.variable_device import only_device
from towers.shards.batch_inputs import (
    Inputs,
    checked_inputs,
    size_and_guards,
    static_shape,
    tensors_of_leaves,
)
from towers.shards.cut_batch import CutBatch, cut_batch, dense_shard, sparse_shard


class Shards:
    """A batch that the caller has cut: the inputs of each tower, in the order of the towers.

    Such as a queue's `dequeue_many` for each tower, or a dataset for each device. The towers are
    weighted by their numbers of examples.

    Args:
      batches: a list of nests of tensors [n_k, …], one nest a tower, all of one structure; the
        sizes n_k may differ, and may be unknown before the step.

    Raises:
      InputError: no list, or an empty one. `build_towers` raises it for nests that differ in
        structure or type, for a shard without an example, for another number of towers, with
        micro-batches, and where a trained variable is upstream of a shard.

    >>> built = towers.build_towers(model_fn, towers.Shards([queue.dequeue() for _ in range(4)]),
    ...                             optimizer, 4, 'mean')
    """

    _are_equal = False  # whether it is certain that all have the same number of examples

    def __init__(self, batches: typing.Sequence):
        if not isinstance(batches, (list, tuple)) or not batches:
            raise InputError('Shards(%.80r): expected a list with the inputs of each tower.'
                             % (batches,))
        self.batches = list(batches)

    def check(self, devices: typing.Sequence[str]) -> None:
        """Raises `InputError` for inputs that a build on these devices does not take."""
        if len(self.batches) != len(devices):
            raise InputError('Shards has the inputs of %d towers, and there are %d devices: pass '
                             'one for each.' % (len(self.batches), len(devices)))
        self._checked()

    def cut(self) -> CutBatch:
        """Makes the `CutBatch` of a build; each shard stays on the device where the caller has made
        it."""
        checked = self._checked()
        static_sizes = {inputs.size for inputs in checked}
        is_even = self._are_equal or len(static_sizes) == 1 and None not in static_sizes
        shards = []
        sizes = []
        with tf.name_scope('shards'):
            for position, batch in enumerate(self.batches):
                shard, size = _fed_shard(position, batch, checked[position], is_even)
                shards.append(shard)
                sizes.append(size)
            with tf.device(None), tf.device('/cpu:0'):
                return cut_batch(shards, sizes, sum(sizes), is_even)

    def _checked(self) -> typing.List[Inputs]:
        """List of the `Inputs` of each shard; raises `InputError` unless all have the same
        structure, types and shapes [n, …]."""
        checked = [checked_inputs(batch) for batch in self.batches]
        for position, each in enumerate(checked):
            try:
                tf.nest.assert_same_structure(self.batches[0], self.batches[position])
            except (TypeError, ValueError) as error:
                raise InputError('shard %d has another structure than shard 0: %s'
                                 % (position, str(error).split('\n', 1)[0])) from None
            if each.size == 0:
                raise InputError('shard %d has no example: pass one for each tower at least.'
                                 % position)
            for (path, leaf), (_, other) in zip(each.leaves, checked[0].leaves):
                if not _have_same_type(path, leaf, other):
                    raise InputError('%s of shard %d is %s, and of shard 0 %s: expected one type '
                                     'and shape [n, …].' % (path, position, leaf, other))
        return checked


def _have_same_type(path: str, leaf: typing.Any, other: typing.Any) -> bool:
    """Whether two leaves have the same type and, but for the number of examples, the same shape.
    `path` names both in an error."""
    if leaf is None or other is None:
        return leaf is other
    if isinstance(leaf, tf.SparseTensor) != isinstance(other, tf.SparseTensor):
        return False
    if tf.as_dtype(leaf.dtype).base_dtype != tf.as_dtype(other.dtype).base_dtype:
        return False
    shape_of_example = static_shape(path, leaf)[1:]
    return shape_of_example.is_compatible_with(static_shape(path, other)[1:])


def _device_of_input(op: tf.Operation) -> str:
    """A device function: the device of the first input of an operation, or else the CPU."""
    device = op.inputs[0].device if len(op.inputs) else ''
    return device or '/cpu:0'


def _fed_shard(position: int, batch: typing.Any, inputs: Inputs,
               is_even: bool) -> typing.Tuple[typing.Any, typing.Any]:
    """Makes the tensors of a shard that can be fed, on the devices of the caller's tensors.

    Args:
      position: the index of the shard.
      batch: the nest of the caller's tensors.
      inputs: the `Inputs` of this nest.
      is_even: whether all shards have the same size for certain.

    Returns:
      `(nest of the tensors, number of examples)`.
    """
    with tf.device(None), tf.device(_device_of_input):
        tensors = tensors_of_leaves(inputs.leaves)
        size, guards = size_and_guards(inputs, tensors)
        if inputs.size is None:
            guards.append(tf.Assert(size > 0, [
                'towers: shard %d of Shards has no example' % position]))
        fed: typing.List[typing.Any] = []
        with tf.control_dependencies(guards):
            for tensor in tensors:
                if tensor is None:
                    fed.append(None)
                elif isinstance(tensor, tf.SparseTensor):
                    fed.append(sparse_shard(tensor, 0, size))
                else:
                    fed.append(dense_shard(tf.identity(tensor), is_even))
    return tf.nest.pack_sequence_as(batch, fed), size


class StagedInputs(Shards):
    """The batches of a dataset, cut and copied ahead; see `staged`.

    Attributes:
      initializer: the operation that begins to read; `tf.tables_initializer()` and with it a
        `tf.train.MonitoredTrainingSession` run it, too.
      devices: the devices of the shards: a tuple of names.
    """

    _are_equal = True

    def __init__(self, shards: typing.Sequence, devices: typing.Tuple[str, ...],
                 initializer: tf.Operation):
        super().__init__(shards)
        self.initializer = initializer
        self.devices = devices

    def check(self, devices: typing.Sequence[str]) -> None:
        """Raises `InputError` for a build on other devices."""
        if tuple(devices) != self.devices:
            raise InputError('the inputs are staged on %s, and the towers are on %s: pass the same '
                             'devices to towers.staged and to build_towers.' % (
                                 ', '.join(map(short_name, self.devices)),
                                 ', '.join(map(short_name, devices))))


def staged(dataset: typing.Any, devices: typing.Union[None, int, str, typing.Sequence] = None,
           buffer_size: int = 1) -> StagedInputs:
    """Stages the batches of a dataset on the towers' devices.

    Args:
      dataset: a `tf.data.Dataset` of whole batches: a nest of dense tensors [n, …], where the
        number of towers divides n (`batch(n, drop_remainder=True)`). In the model function each
        tower has [n / N, …], in the order of the batch.
      devices: the devices of the towers, the same as for `build_towers`.
      buffer_size: how many shards wait on each device.

    Returns:
      `StagedInputs`, in the place of the inputs of `build_towers`. Run its `initializer` once.

    Raises:
      InputError: no dataset, sparse or scalar elements, or a static n that N does not divide.
      DeviceError, InvalidArgumentError: see `resolve_devices`.

    >>> inputs = towers.staged(dataset.batch(256, drop_remainder=True), 4)
    >>> built = towers.build_towers(model_fn, inputs, optimizer, 4, 'mean')
    >>> session.run(inputs.initializer)
    """
    check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')
    check_count('buffer_size', buffer_size)
    names = tuple(resolve_devices(devices))
    check_one_stage('staged', names)
    count = len(names)
    for shape in tf.nest.flatten(tf.data.get_output_shapes(dataset)):
        if not _can_be_cut(shape, count):
            raise InputError('the dataset has elements of shape %s: expected dense batches [n, …], '
                             'with an n that %d towers divide.' % (shape, count))

    def shards_of(*elements: tf.Tensor) -> tf.data.Dataset:
        batch = elements[0] if len(elements) == 1 else elements
        return tf.data.Dataset.from_tensor_slices(
            tf.nest.map_structure(lambda tensor: _stacked_shards(tensor, count), batch))

    with only_device('/cpu:0'):
        iterator = compat.multi_device_iterator(
            dataset.flat_map(shards_of), names, int(buffer_size))
        shards = iterator.get_next()
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return StagedInputs(shards, names, iterator.initializer)


def _can_be_cut(shape: typing.Any, count: int) -> bool:
    """Whether `count` towers can divide the elements of a dataset that have this shape: they are
    dense, and of unknown or divisible size."""
    if not isinstance(shape, tf.TensorShape) or not shape.ndims:
        return False
    size = shape.as_list()[0]
    return size is None or size % count == 0


def _stacked_shards(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Reshapes a tensor `[n, …] → [count, n / count, …]`."""
    size, *shape_of_example = tensor.shape.as_list()
    if size is None:
        size_of_shard = tf.shape(tensor)[0] // count
        static_size = None
    else:
        size_of_shard = static_size = size // count
    stacked = tf.reshape(tensor, tf.concat([[count, size_of_shard], tf.shape(tensor)[1:]], 0))
    stacked.set_shape([count, static_size] + shape_of_example)
    return stacked
