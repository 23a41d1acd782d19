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
        micro-batches, and where a trained variable stands behind a shard.

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
        """The `CutBatch` for a build; each shard is fed where the caller has made it."""
        checked = self._checked()
        is_even = self._are_equal or checked[0].size is not None and len(
            {each.size for each in checked}) == 1
        with tf.name_scope('shards'):
            inputs, sizes = zip(*[_whole(number, batch, each, is_even) for number, (batch, each)
                                  in enumerate(zip(self.batches, checked))])
            with tf.device(None), tf.device('/cpu:0'):
                return cut_batch(list(inputs), list(sizes), sum(sizes), is_even)

    def _checked(self):
        """The `Inputs` of each shard, of one structure, with the same types and shapes [n, …]."""
        checked = [checked_inputs(batch) for batch in self.batches]
        for number, each in enumerate(checked):
            try:
                tf.nest.assert_same_structure(self.batches[0], self.batches[number])
            except (TypeError, ValueError) as error:
                raise InputError('shard %d has another structure than shard 0: %s'
                                 % (number, str(error).split('\n', 1)[0])) from None
            if each.size == 0:
                raise InputError('shard %d has no example: pass one for each tower at least.'
                                 % number)
            for (path, leaf), (_, other) in zip(each.leaves, checked[0].leaves):
                if _kind(leaf) != _kind(other) or leaf is not None and not static_shape(
                        path, leaf)[1:].is_compatible_with(static_shape(path, other)[1:]):
                    raise InputError('%s of shard %d is %s, and of shard 0 %s: expected one type '
                                     'and shape [n, …].' % (path, number, leaf, other))
        return checked


def _kind(leaf):
    return None if leaf is None else (
        isinstance(leaf, tf.SparseTensor), tf.as_dtype(leaf.dtype).base_dtype)


def _whole(number, batch, inputs, is_even):
    """(nest of tensors that can be fed, size) of a shard, on the devices of its tensors."""
    with tf.device(None), tf.device(lambda op: (
            op.inputs[0].device if len(op.inputs) else '') or '/cpu:0'):
        tensors = tensors_of_leaves(inputs.leaves)
        size, guards = size_and_guards(inputs, tensors)
        if inputs.size is None:
            guards.append(tf.Assert(size > 0, [
                'towers: shard %d of Shards has no example' % number]))
        with tf.control_dependencies(guards):
            fed = [None if tensor is None else sparse_shard(tensor, 0, size)
                   if isinstance(tensor, tf.SparseTensor) else
                   dense_shard(tf.identity(tensor), is_even) for tensor in tensors]
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
        self.initializer, self.devices = initializer, devices

    def check(self, devices: typing.Sequence[str]) -> None:
        """Raises `InputError` for a build on other devices."""
        if tuple(devices) != self.devices:
            raise InputError('the inputs are staged on %s, and the towers are on %s: pass the same '
                             'devices to towers.staged and to build_towers.' % tuple(
                                 ', '.join(map(short_name, each))
                                 for each in (self.devices, devices)))


def staged(dataset: typing.Any, devices: typing.Union[None, int, str, typing.Sequence] = None,
           buffer_size: int = 1) -> StagedInputs:
    """Stages the batches of a dataset on the towers' devices.

    Args:
      dataset: a `tf.data.Dataset` of whole batches: a nest of dense tensors [n, …], where the
        number of towers divides n (`batch(n, drop_remainder=True)`). In the model function each
        tower has [n / N, …], in the order of the batch.
      devices: as for `build_towers`; the same ones.
      buffer_size: how many shards wait on each device.

    Returns:
      `StagedInputs`, in the place of the inputs of `build_towers`. Run its `initializer` once.

    Raises:
      InputError: no dataset, sparse or scalar elements, or a static n that N does not divide.
      DeviceError, InvalidArgumentError: as `resolve_devices`.

    >>> inputs = towers.staged(dataset.batch(256, drop_remainder=True), 4)
    >>> built = towers.build_towers(model_fn, inputs, optimizer, 4, 'mean')
    >>> session.run(inputs.initializer)
    """
    check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')
    check_count('buffer_size', buffer_size)
    names = tuple(resolve_devices(devices))
    check_one_stage(names, 'staged')
    count = len(names)
    for shape in tf.nest.flatten(tf.data.get_output_shapes(dataset)):
        if not isinstance(shape, tf.TensorShape) or shape.ndims in (None, 0) or (
                shape.as_list()[0] or 0) % count:
            raise InputError('the dataset has elements of shape %s: expected dense batches [n, …], '
                             'with an n that %d towers divide.' % (shape, count))

    def cut(*batch):
        batch = batch[0] if len(batch) == 1 else batch
        return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(
            lambda tensor: _cut(tensor, count), batch))
    with only_device('/cpu:0'):
        iterator = compat.multi_device_iterator(dataset.flat_map(cut), names, int(buffer_size))
        shards = iterator.get_next()
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return StagedInputs(shards, names, iterator.initializer)


def _cut(tensor, count):
    """[n, …] as [count, n / count, …]."""
    size = tensor.shape.as_list()[0]
    each = tf.shape(tensor)[0] // count if size is None else size // count
    cut = tf.reshape(tensor, tf.concat([[count, each], tf.shape(tensor)[1:]], 0))
    cut.set_shape([count, None if size is None else size // count] + tensor.shape.as_list()[1:])
    return cut
