"""Buffers on the towers' devices, each of which holds a tower's shard of one batch.

They are TF's `Stage` and `Unstage`, whose contents a session finds by a name. On a server the name
is the server's, and so are the contents: they outlive the session, and other sessions and graphs
find them. An iterator is private to its session. So the name is one that no other build has, and
every batch has with it whose it is, see `staged_owner`.
"""

import uuid

import tensorflow.compat.v1 as tf


class Buffers:
    """A buffer a tower, and one on the CPU: for the batch's owner, and for tensors of no tower or
    that no GPU can hold."""

    def __init__(self, cut, devices, name):
        """
        Args:
          cut: `Shards` as those that are to be held.
          devices: the towers' devices.
          name: prefix of the buffers' names; the attribute `name` is what no other build has.
        """
        self._devices = list(devices) + ['/cpu:0']
        self.name = '%s%s_' % (name, uuid.uuid4().hex)
        self._names = ['%s%d' % (self.name, index) for index in range(len(self._devices))]
        self._places = []  # (buffer, position in it) of each tensor of `tensors_of(cut)`
        self._dtypes = [[] for _ in devices] + [[tf.string]]
        for index, tensor in tensors_of(cut):
            if index is None or tensor.dtype in (tf.string, tf.variant, tf.resource):
                index = len(devices)
            self._places.append((index, len(self._dtypes[index])))
            self._dtypes[index].append(tensor.dtype)

    def _one(self, which, make, **more):
        with tf.device(self._devices[which]):
            return make(shared_name=self._names[which], container='', capacity=0, memory_limit=0,
                        dtypes=self._dtypes[which], **more)

    def _each(self, make):
        """List of `make(index)` for each buffer that holds anything."""
        return [make(index) for index in range(len(self._devices)) if self._dtypes[index]]

    def sizes(self):
        """How many batches are in each of them: an int32 tensor [buffers]."""
        return tf.stack(self._each(lambda index: self._one(index, tf.raw_ops.StageSize)))

    def owner(self):
        """The owner of the batch that is held, which stays there: a string; waits for a batch."""
        return self._one(-1, tf.raw_ops.StagePeek, index=0)[0]

    def clear(self):
        return tf.group(*self._each(lambda index: self._one(index, tf.raw_ops.StageClear)))

    def put(self, tensors, owner):
        """Puts a batch into the buffers: its tensors, in the order of `tensors_of`.

        Nothing is put in before all of the batch is there, so that an error on the way to one
        tower's shard leaves no buffer with a batch that another one has not.
        """
        values = [[] for _ in self._devices[1:]] + [[owner]]
        for (index, _), tensor in zip(self._places, tensors):
            values[index].append(tensor)

        def of_one(index):
            with tf.device(self._devices[index]):
                return tf.raw_ops.Stage(values=values[index], shared_name=self._names[index],
                                        container='', capacity=0, memory_limit=0)
        with tf.control_dependencies([tensor.op for tensor in tensors]):
            return tf.group(*self._each(of_one))

    def take(self, after=(), keeps_first=False, check=None, held_until=None):
        """Takes one batch out of the buffers: its tensors, in the order of `tensors_of`.

        All buffers give their part or none does, so that they always hold the same batch.

        Args:
          after: operations to wait for.
          keeps_first: leave the batch in the buffers.
          check: function of the owner of the batch; an operation that fails in a wrong one.
          held_until: `Lock.held_until` of the lock to be held until all is taken.
        """
        def of_one(index):
            if keeps_first:
                return index, self._one(index, tf.raw_ops.StagePeek, index=0)
            return index, self._one(index, tf.raw_ops.Unstage)
        with tf.control_dependencies(after):
            taken = dict(self._each(of_one))
        all_taken = [tensors[0].op for tensors in taken.values()]
        if check is not None:
            all_taken.append(check(taken[len(self._devices) - 1][0]))
        if held_until is not None:
            all_taken = [held_until(all_taken)]
        # A run of one tower alone must not leave the others a batch behind.
        with tf.control_dependencies(all_taken):
            found = []
            for index, position in self._places:
                with tf.device(self._devices[index]):
                    found.append(tf.identity(taken[index][position]))
        return found


def tensors_of(shards):
    """[(tower, tensor)] of all tensors of `Shards`; sizes, weights and batch size have no tower."""
    found = []
    for index, nest in enumerate(shards.inputs):
        found += [(index, leaf) for leaf in tf.nest.flatten(nest, expand_composites=True)
                  if leaf is not None]
    seen = set()
    for value in list(shards.sizes) + list(shards.weights) + [shards.batch_size]:
        if isinstance(value, tf.Tensor) and id(value) not in seen:
            seen.add(id(value))
            found.append((None, value))
    return found
