"""Inputs that are cut into shards before the build: `Shards`, by the caller; `staged`, ahead.

For `staged` TensorFlow's own `MultiDeviceIterator` reads ahead: while the towers compute one step,
the shards of the next are copied to their devices.
"""

import functools
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
from towers.shards.cut_batch import CutBatch, cut_batch, dense_shard, name_of_shard, sparse_shard


class Shards:
    """A batch that the caller has cut: the inputs of each tower, in the order of the towers.

    The inputs are a queue's `dequeue_many` for each tower, for example, or a dataset for each
    device. The towers are weighted by their numbers of examples.

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

    _is_even = False  # whether the way of cutting gives each tower the same number of examples

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
        inputs_of_shards = self._checked()
        static_sizes = {inputs.size for inputs in inputs_of_shards}
        have_one_static_size = len(static_sizes) == 1 and None not in static_sizes
        is_even = self._is_even or have_one_static_size
        shards = []
        sizes = []
        with tf.name_scope('shards'):
            for index, batch in enumerate(self.batches):
                shard = _fed_shard(index, batch, inputs_of_shards[index], is_even)
                shards.append(shard.tensors)
                sizes.append(shard.size)
            with only_device('/cpu:0'):  # for the batch's size and the weights
                return cut_batch(shards, sizes, sum(sizes), is_even)

    def _checked(self) -> typing.List[Inputs]:
        """List of the `Inputs` of each shard; raises `InputError` unless all have the same
        structure, types and shapes [n, …]."""
        inputs_of_shards = [checked_inputs(batch) for batch in self.batches]
        for index, inputs in enumerate(inputs_of_shards):
            self._check_structure(index)
            if inputs.size == 0:
                raise InputError('shard %d has no example: pass one for each tower at least.'
                                 % index)
            _check_same_types(index, inputs, inputs_of_shards[0])
        return inputs_of_shards

    def _check_structure(self, index: int) -> None:
        """Raises `InputError` if the nest of the shard with that index differs from shard 0's."""
        try:
            tf.nest.assert_same_structure(self.batches[0], self.batches[index])
        except (TypeError, ValueError) as error:
            raise InputError('shard %d has another structure than shard 0: %s'
                             % (index, str(error).split('\n', 1)[0])) from None


def _check_same_types(index: int, inputs: Inputs, first: Inputs) -> None:
    """Raises `InputError` if the leaves of the shard with that index differ in type or shape from
    the leaves of the `first` shard."""
    for (path, leaf), (_, first_leaf) in zip(inputs.leaves, first.leaves):
        if not _have_same_type(path, leaf, first_leaf):
            raise InputError('%s of shard %d is %s, and of shard 0 %s: expected one type '
                             'and shape [n, …].' % (path, index, leaf, first_leaf))


def _have_same_type(path: str, leaf: typing.Any, other: typing.Any) -> bool:
    """Whether two leaves have the same type and, but for the number of examples, the same shape.
    `path` names both in an error."""
    if leaf is None or other is None:
        return leaf is other  # both are None
    if isinstance(leaf, tf.SparseTensor) != isinstance(other, tf.SparseTensor):
        return False
    if tf.as_dtype(leaf.dtype).base_dtype != tf.as_dtype(other.dtype).base_dtype:
        return False
    shape_of_example = static_shape(path, leaf)[1:]
    return shape_of_example.is_compatible_with(static_shape(path, other)[1:])


def _device_of_input(op: tf.Operation) -> str:
    """A function for `tf.device`: the device of an operation's first input; the CPU for an
    operation without inputs, such as a constant, or whose input has no device."""
    device = op.inputs[0].device if len(op.inputs) else ''
    return device or '/cpu:0'


class _FedShard(typing.NamedTuple):
    """A shard that can be fed."""
    tensors: typing.Any  # a nest, like the caller's
    size: typing.Union[int, tf.Tensor]  # its number of examples


def _fed_shard(index: int, batch: typing.Any, inputs: Inputs, is_even: bool) -> _FedShard:
    """Makes the tensors of a shard that can be fed, on the devices of the caller's tensors.

    Args:
      index: the index of the shard.
      batch: the nest of the caller's tensors.
      inputs: the `Inputs` of this nest.
      is_even: whether all shards have the same size for certain.
    """
    # `tf.device` with a function asks it for the device of each operation that is made; with None
    # it ends the device scopes of the caller.
    with tf.device(None), tf.device(_device_of_input):
        tensors = tensors_of_leaves(inputs.leaves)
        size, guards = size_and_guards(inputs, tensors)
        if inputs.size is None:
            guards.append(tf.Assert(size > 0, [
                'towers: shard %d of Shards has no example' % index]))
        with tf.control_dependencies(guards):
            fed = [_fed(tensor, size, is_even) for tensor in tensors]
    return _FedShard(tf.nest.pack_sequence_as(batch, fed), size)


def _fed(tensor: typing.Any, size: typing.Any, is_even: bool) -> typing.Any:
    """A tensor of a shard as one that can be fed; None stays None.

    Args:
      tensor: a dense or a sparse tensor, or None.
      size: the number of examples of the shard.
      is_even: whether all shards have the same size for certain.
    """
    if tensor is None:
        return None
    if isinstance(tensor, tf.SparseTensor):
        return sparse_shard(tensor, start=0, size=size)
    # The identity is on the tensor's device, and waits for the assertions. The other towers are
    # copies of tower 0 with its static shapes, so that only a size of all shards may be static.
    return dense_shard(tf.identity(tensor), has_static_size=is_even, name=name_of_shard(tensor))


class StagedInputs(Shards):
    """The batches of a dataset, cut and copied ahead; see `staged`.

    Attributes:
      initializer: the operation that begins to read; `tf.tables_initializer()` also runs it, and so
        does a `tf.train.MonitoredTrainingSession`.
      devices: the devices of the shards: a tuple of names.
    """

    _is_even = True  # `_stacked_shards` takes no batch that the towers do not divide

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
    num_towers = len(names)
    for shape in tf.nest.flatten(tf.data.get_output_shapes(dataset)):
        if not _can_be_cut(shape, num_towers):
            raise InputError('the dataset has elements of shape %s: expected dense batches [n, …], '
                             'with an n that %d towers divide.' % (shape, num_towers))
    # A `MultiDeviceIterator` gives its devices the elements of a dataset in turn: so the elements
    # are shards, and the shards of one batch follow each other.
    shards_of_batch = functools.partial(_dataset_of_shards, num_towers)
    with only_device('/cpu:0'):
        iterator = compat.multi_device_iterator(
            dataset.flat_map(shards_of_batch), names, int(buffer_size))
        shards = iterator.get_next()
    # The sessions of `tf.train` run these initializers by themselves.
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return StagedInputs(shards, names, iterator.initializer)


def _can_be_cut(shape: typing.Any, num_towers: int) -> bool:
    """Whether towers can divide the elements of a dataset that have this shape: they are dense, of
    a known rank of at least 1, and of unknown or divisible size."""
    if not isinstance(shape, tf.TensorShape) or not shape.ndims:
        return False
    size = shape.as_list()[0]
    return size is None or size % num_towers == 0


def _dataset_of_shards(num_towers: int, *components: tf.Tensor) -> tf.data.Dataset:
    """The shards of one batch, as a dataset of as many elements as there are towers.

    Args:
      num_towers: N.
      *components: the batch: one nest, or several if it is a tuple, as `Dataset.map` gives it.
    """
    batch = components[0] if len(components) == 1 else components
    stacked = tf.nest.map_structure(functools.partial(_stacked_shards, num_towers), batch)
    return tf.data.Dataset.from_tensor_slices(stacked)


def _stacked_shards(num_towers: int, tensor: tf.Tensor) -> tf.Tensor:
    """Reshapes a tensor `[n, …] → [N, n / N, …]` for N towers."""
    size, *shape_of_example = tensor.shape.as_list()
    if size is None:
        size_of_shard = tf.shape(tensor)[0] // num_towers
        static_size = None
    else:
        size_of_shard = static_size = size // num_towers
    new_shape = tf.concat([[num_towers, size_of_shard], tf.shape(tensor)[1:]], 0)
    stacked = tf.reshape(tensor, new_shape)
    stacked.set_shape([num_towers, static_size] + shape_of_example)
    return stacked
