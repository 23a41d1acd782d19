"""`staged`: batches of a `tf.data.Dataset`, whose shards wait on the towers' devices.

TensorFlow's own `MultiDeviceIterator` reads ahead: while the towers compute one step, the shards of
the next are copied to their devices.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_count, check_instance
from towers.errors import InputError
from towers.placement.devices import check_one_stage, resolve_devices, short_name
from towers.placement.variable_device import only_device
from towers.tower.shards import cut_batch


class StagedInputs:
    """The batches of a dataset, cut and copied ahead; see `staged`.

    Attributes:
      initializer: the operation that begins to read; `tf.tables_initializer()` and with it a
        `tf.train.MonitoredTrainingSession` run it, too.
      devices: the devices of the shards: a tuple of names.
    """

    def __init__(self, shards: typing.Sequence, devices: typing.Tuple[str, ...],
                 initializer: tf.Operation):
        self.initializer, self.devices, self._shards = initializer, devices, shards

    def check(self, request):
        """Returns this, if a build with the `Request` has its devices; else `InputError`."""
        if tuple(request.devices) != self.devices:
            raise InputError('the inputs are staged on %s, and the towers are on %s: pass the same '
                             'devices to towers.staged and to build_towers.' % tuple(
                                 ', '.join(map(short_name, each))
                                 for each in (self.devices, request.devices)))
        return self

    def shards(self, request):
        """The `CutBatch` of the next batch for a build, each shard on its tower's device."""
        del request
        inputs = []
        for device, shard in zip(self.devices, self._shards):
            with only_device(device), tf.name_scope('shards'):
                inputs.append(tf.nest.map_structure(
                    lambda leaf: tf.placeholder_with_default(leaf, leaf.shape), shard))
        size = tf.nest.flatten(inputs[0])[0].shape.as_list()[0]
        if size is None:
            with only_device('/cpu:0'), tf.name_scope('shards'):
                size = tf.shape(tf.nest.flatten(inputs[0])[0])[0]
        return cut_batch(inputs, [size] * len(inputs), size * len(inputs), is_even=True)


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
        iterator = compat.multi_device_iterator(dataset.flat_map(cut), names, buffer_size)
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
