"""Inputs that are cut into shards before the build: `Shards`, by the caller; `staged`, ahead."""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import InputError
from towers.tower.batch_inputs import looked_at, size_and_guards, static_shape, tensors_of
from towers.tower.shards import cut_batch, dense_shard, sparse_shard
from towers.tower.staged import StagedInputs
from towers.tower.variables_behind_inputs import trained_behind


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

    def __init__(self, batches: typing.Sequence):
        if not isinstance(batches, (list, tuple)) or not batches:
            raise InputError('Shards(%.80r): expected a list with the inputs of each tower.'
                             % (batches,))
        self._batches = list(batches)

    def check(self, request):
        """Returns this, if it is what a build with the `Request` takes; makes no operation.

        Raises:
          InputError: see the class.
        """
        if len(self._batches) != len(request.devices):
            raise InputError('Shards has the inputs of %d towers, and there are %d devices: pass '
                             'one nest of tensors for each.' % (len(self._batches),
                                                                len(request.devices)))
        _checked(self._batches)
        trained = {variable.op.name for variable in tf.trainable_variables()}
        for leaf in tf.nest.flatten(self._batches, expand_composites=True):
            behind = sorted(trained_behind(leaf, trained)) if isinstance(
                leaf, tf.Tensor) and request.objectives and leaf.dtype.is_floating else ()
            if behind:
                raise InputError(
                    'Shards has %s, which is computed from the trainable variable %s: compute it '
                    'in the model function, or pass its tf.stop_gradient.' % (leaf.name, behind[0]))
        return self

    def shards(self, request):
        """The `CutBatch` for a build; each shard is fed where the caller has made it."""
        del request
        looks = _checked(self._batches)
        is_even = looks[0].size is not None and len({look.size for look in looks}) == 1
        with tf.name_scope('shards'):
            inputs, sizes = zip(*[_whole(number, look, is_even)
                                  for number, look in enumerate(looks)])
            with tf.device(None), tf.device('/cpu:0'):
                return cut_batch(list(inputs), list(sizes), sum(sizes), is_even)


def _checked(batches):
    """The `Inputs` of each shard, of one structure, with the same types and shapes [n, …]."""
    looks = [looked_at(batch) for batch in batches]
    for number, look in enumerate(looks):
        try:
            tf.nest.assert_same_structure(looks[0].nest, look.nest)
        except (TypeError, ValueError) as error:
            raise InputError('shard %d has another structure than shard 0: %s'
                             % (number, str(error).split('\n', 1)[0])) from None
        if look.size == 0:
            raise InputError('shard %d has no example: pass one for each tower at least.' % number)
        for (path, leaf), (_, other) in zip(look.leaves, looks[0].leaves):
            if _kind(leaf) != _kind(other) or leaf is not None and not static_shape(
                    path, leaf)[1:].is_compatible_with(static_shape(path, other)[1:]):
                raise InputError('%s of shard %d is %s, and of shard 0 %s: expected one type and '
                                 'shape [n, …].' % (path, number, leaf, other))
    return looks


def _kind(leaf):
    return None if leaf is None else (
        isinstance(leaf, tf.SparseTensor), tf.as_dtype(leaf.dtype).base_dtype)


def _whole(number, look, is_even):
    """(nest of tensors that can be fed, size) of a shard, on the devices of its tensors."""
    with tf.device(None), tf.device(lambda op: (
            op.inputs[0].device if len(op.inputs) else '') or '/cpu:0'):
        tensors = tensors_of(look)
        size, guards = size_and_guards(look, tensors)
        if look.size is None:
            guards.append(tf.Assert(size > 0, [
                'towers: shard %d of Shards has no example' % number]))
        with tf.control_dependencies(guards):
            fed = [None if tensor is None else sparse_shard(tensor, 0, size)
                   if isinstance(tensor, tf.SparseTensor) else
                   dense_shard(tf.identity(tensor), is_even) for tensor in tensors]
    return tf.nest.pack_sequence_as(look.nest, fed), size


ALREADY_CUT = (Shards, StagedInputs)


def check_cuts_nothing(request):
    """Raises `InputError` for arguments that say how a batch is cut, where it is cut already."""
    for name, given, default in (('remainder', request.remainder, 'error'),
                                 ('shares', set(request.shares), {1})):
        if given != default:
            raise InputError('the inputs are cut into shards already: leave %s= out.' % name)
    if request.accumulate > 1:
        raise InputError('the inputs are cut already, a shard for each tower, and accumulate= or '
                         'micro_batches= cut each into %d: pass the tensors of a batch instead.'
                         % request.accumulate)
