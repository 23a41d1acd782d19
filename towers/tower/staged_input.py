"""Each tower's next shard, on its device before the tower needs it.

Every tower has a buffer on its device (TF's `Stage` and `Unstage`). A step takes batch t out of the
buffers and, while the towers work on it, reads batch t + 1 from the program's own iterator, cuts
it, and puts the shards in. In the step's graph:

    settle   if a second set of buffers, `kept`, holds a batch: put it back   (after a failed step)
    prime    if a buffer is empty: get_next, cut, put in          (the first step; after the end)
    take     each tower's shard out of its buffer                 (after `prime`)
    keep     put the shards into `kept`                           (after `take`)
    read     get_next_as_optional; if there is a batch, cut it and put it in; empty `kept`
                                                                  (after `keep`)

All writes of the update wait for `read`. So step t trains on batch t as without buffers: batches go
through in order; after the last one is trained on, `prime` meets the end of the data and raises
`OutOfRangeError` with nothing done; a run of something else than the train op takes a batch out of
the buffers and puts none in. Running the iterator's initializer empties the buffers. A buffer
belongs to its session: the batch in it is not trained on yet when a run stops, and the run that
resumes reads it again.

Where the read of batch t + 1 fails, so does step t, with none of its update done. Its batch is
still in `kept`: the next run puts it back and works on it *without reading ahead*, so that it is
trained on whatever the iterator does; the run after that primes, as the first one. The batches that
are trained on are those of a loop without buffers, and the error is raised a step earlier.

A full `kept` says that reading had not ended, and not why: the towers' own work may have failed
while it went on. Then it fails again in the run that does not read, in which nothing is kept, and
the run after that goes on with the next batch. Hence a batch is put back once at the most. (What
was being read when the work failed is lost: TensorFlow ends all operations of a step that fails.)

The operations that read have names as TensorFlow's own ones: programs tell by `IteratorGetNext` in
the text of an error that it is one of the data.

What else in the graph or in a run would be another batch than it looks like is refused, see
`staged_guard`.

The graph from the iterator to the inputs is imported once for `prime` and once for `read`. Branches
are made of `Switch` and `Merge`, since `tf.cond` makes other operations in other versions.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.tower.input_way import initializers, inputs_from, way_of
from towers.tower.shards import Shards, sparse_placeholder, split_batch, with_sparse_tensors
from towers.tower.staged_guard import check_alone, guard_reads, mark_use

StagedInputs = collections.namedtuple('StagedInputs', 'read staged use work')
"""How the inputs get to the towers ahead of time.

Fields:
  read: the operation that reads the next batch from the iterator; None with `'first'`, where the
    towers are given the first batch over and over.
  staged: the operation after which the next batch is on the towers' devices, which the update
    waits for; or None.
  use: `Use` of the batch that is taken, whose check the update waits for: a run in which all towers
    are fed by hand fails. None with `'first'`, where no batch is lost.
  work: the operation after which all else is done that the update waits for.
"""


def staged_shards(inputs, devices, remainder, keeps_first, name, called='towers'):
    """As `split_batch`, but each shard comes out of a buffer on its tower's device.

    Args:
      inputs, remainder, called: as for `split_batch`; the inputs come from iterators of
        `tf.data`.
      devices: the towers' devices.
      keeps_first: leave the first batch in the buffers, and give it to every step: to measure how
        fast towers are with inputs in their own memory.
      name: prefix of the names of the operations.

    Returns:
      `(shards, staged)`: `Shards`, and `StagedInputs` in which `work` is still None.

    Raises:
      InputError: inputs that come from no iterator, or by operations that cannot read ahead; or
        from an iterator that another build reads ahead from, or that is saved.
    """
    inputs = with_sparse_tensors(inputs)
    check_alone(inputs)
    reads, region = way_of(inputs)
    graph = tf.get_default_graph()
    with tf.name_scope(name + '_staged') as scope, tf.device(None), \
            graph.colocate_with(None, ignore_existing=True):
        # The shapes and types of what is staged, from a cut that no step runs.
        cut = split_batch(inputs, len(devices), remainder, called=called)
        buffers = _Buffers(cut, devices, scope.replace('/', '_'))
        kept = None if keeps_first else _Buffers(cut, devices, scope.replace('/', '_') + 'kept_')
        with tf.device('/cpu:0'):
            with tf.control_dependencies([guard_reads(reads)]):
                empty, fresh, is_retried = _settled(buffers, kept)
            primed = _primed(inputs, reads, region, buffers, empty, remainder, len(devices), called)
        taken = buffers.take([primed], keeps_first)
        read, staged, use, given = None, None, None, taken
        if not keeps_first:
            given, use = mark_use(taken, name)
            with tf.device('/cpu:0'):
                with tf.control_dependencies([fresh]):
                    keep = kept.put(taken)
                read, done = _read_next(inputs, reads, region, buffers, keep, remainder,
                                        len(devices), called)
                with tf.control_dependencies([done]):
                    cleared = kept.clear()
                with tf.control_dependencies([cleared]):
                    done = tf.identity(done.outputs[0])
                with tf.control_dependencies([tensor.op for tensor in taken]):
                    reads_nothing = tf.identity(is_retried)
                staged = tf.raw_ops.Merge(inputs=[done, reads_nothing], name='staged').output.op
        shards = _shards_of(cut, given)
    for each in initializers(reads):  # the buffers hold a batch of the old data
        with tf.device(None), tf.control_dependencies(None):
            compat.add_control_inputs(each, [
                held.clear() for held in (buffers, kept) if held is not None])
    return shards, StagedInputs(read, staged, use, None)


def _settled(buffers, kept):
    """Puts the batch back that a failed step has left in `kept`; else empties `kept`.

    A step that failed while it filled buffers leaves some of them empty: what is in the others is
    given up.

    Args:
      buffers: `_Buffers` that the towers take from.
      kept: `_Buffers`; None where nothing is read ahead.

    Returns:
      `(empty, fresh, is_retried)`: whether a batch has to be read first, a bool tensor that is
      there when all is settled; a tensor that is alive where no batch is put back, and one that is
      where one is. Both are None without `kept`.
    """
    full = buffers.are_full()
    if kept is None:
        return tf.logical_not(full, name='empty'), None, None
    retried = tf.logical_and(kept.are_full(), tf.logical_not(full), name='retried')
    fresh, is_retried = _switch(retried, retried)
    with tf.control_dependencies([is_retried]):
        with tf.control_dependencies([buffers.clear()]):
            put = buffers.put(kept.take())
    with tf.control_dependencies([put]):
        put_back = tf.identity(is_retried)
    with tf.control_dependencies([fresh]):
        cleared = kept.clear()
    with tf.control_dependencies([cleared]):
        nothing_kept = tf.identity(fresh)
    settled = tf.raw_ops.Merge(inputs=[put_back, nothing_kept], name='settled').output
    with tf.control_dependencies([settled]):
        empty = tf.logical_not(tf.logical_or(full, retried), name='empty')
    return empty, fresh, is_retried


def _primed(inputs, reads, region, buffers, empty, remainder, num_shards, called):
    """Reads a batch if the buffers are `empty`: the operation after which they are full."""
    not_empty, is_empty = _switch(empty, empty)
    handles = {read: _switch(read.inputs[0], empty)[1] for read in reads}
    with tf.control_dependencies([is_empty]):
        first = {read: tf.raw_ops.IteratorGetNext(
            iterator=handles[read], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs],
            name='first/IteratorGetNext') for read in reads}
        with tf.control_dependencies([buffers.clear()]):
            put = buffers.put(_tensors_alone(split_batch(
                inputs_from(first, inputs, region, is_empty, 'prime'), num_shards, remainder,
                called=called)))
    with tf.control_dependencies([put]):
        primed = tf.identity(is_empty)
    return tf.raw_ops.Merge(inputs=[primed, not_empty], name='primed').output.op


def _read_next(inputs, reads, region, buffers, keep, remainder, num_shards, called):
    """Reads the next batch, after `keep`: `(operation that reads, operation after which it is
    staged or the data have ended)`."""
    with tf.control_dependencies([keep]):
        optionals = [tf.raw_ops.IteratorGetNextAsOptional(
            iterator=read.inputs[0], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs],
            name='next/IteratorGetNextAsOptional') for read in reads]
    has = [tf.raw_ops.OptionalHasValue(optional=optional) for optional in optionals]
    has_all = has[0] if len(has) == 1 else tf.reduce_all(tf.stack(has))
    ended, goes_on = _switch(has_all, has_all)
    present = {read: _switch(optional, has_all)[1] for read, optional in zip(reads, optionals)}
    with tf.control_dependencies([goes_on]):
        values = {read: tf.raw_ops.OptionalGetValue(
            optional=present[read], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs], name='value') for read in reads}
        put = buffers.put(_tensors_alone(split_batch(
            inputs_from(values, inputs, region, goes_on, 'ahead'), num_shards, remainder,
            called=called)))
    with tf.control_dependencies([put]):
        goes_on = tf.identity(goes_on)
    done = tf.raw_ops.Merge(inputs=[goes_on, ended], name='read').output.op
    last = optionals[0].op
    if len(optionals) > 1:
        with tf.control_dependencies([optional.op for optional in optionals]):
            last = tf.no_op('next_read')
    return last, done


def _switch(data, pred):
    """`data` twice: alive where `pred` is false, and where it is true.

    Operations that wait for the `Switch` itself run in either case; they wait for the identities.
    """
    found = tf.raw_ops.Switch(data=data, pred=pred)
    return tf.identity(found.output_false), tf.identity(found.output_true)


class _Buffers:
    """A buffer a tower, and one on the CPU for tensors of no tower or that no GPU can hold."""

    def __init__(self, cut, devices, name):
        self._devices = list(devices) + ['/cpu:0']
        self._names = ['%s%d' % (name, index) for index in range(len(self._devices))]
        self.places = []  # (buffer, position in it) of each tensor of `_tensors(cut)`
        self.dtypes = [[] for _ in self._devices]
        for index, tensor in _tensors(cut):
            if index is None or tensor.dtype in (tf.string, tf.variant, tf.resource):
                index = len(devices)
            self.places.append((index, len(self.dtypes[index])))
            self.dtypes[index].append(tensor.dtype)

    def _each(self, make):
        """List of `make(index, keywords)` for each buffer that holds anything, on its device."""
        made = []
        for index, device in enumerate(self._devices):
            if self.dtypes[index]:
                with tf.device(device):
                    made.append((index, make(index, dict(
                        shared_name=self._names[index], container='', capacity=0,
                        memory_limit=0))))
        return made

    def are_full(self):
        """Whether there is a batch in each of them: a bool tensor."""
        sizes = [size for _, size in self._each(lambda index, how: tf.raw_ops.StageSize(
            dtypes=self.dtypes[index], **how))]
        return tf.reduce_all(tf.stack([tf.greater(size, 0) for size in sizes]))

    def clear(self):
        return tf.group(*[op for _, op in self._each(lambda index, how: tf.raw_ops.StageClear(
            dtypes=self.dtypes[index], **how))])

    def put(self, tensors):
        """Puts a batch into the buffers: its tensors, in the order of `_tensors`.

        Nothing is put in before all of the batch is there, so that an error on the way to one
        tower's shard leaves no buffer with a batch that another one has not.
        """
        values = [[] for _ in self._devices]
        for (index, _), tensor in zip(self.places, tensors):
            values[index].append(tensor)
        with tf.control_dependencies([tensor.op for tensor in tensors]):
            return tf.group(*[op for _, op in self._each(lambda index, how: tf.raw_ops.Stage(
                values=values[index], **how))])

    def take(self, after=(), keeps_first=False):
        """Takes one batch out of the buffers: its tensors, in the order of `_tensors`.

        All buffers give their part or none does, so that they always hold the same batch.
        """
        def of_one(index, how):
            if keeps_first:
                return tf.raw_ops.StagePeek(index=0, dtypes=self.dtypes[index], **how)
            return tf.raw_ops.Unstage(dtypes=self.dtypes[index], **how)
        with tf.control_dependencies(after):
            taken = dict(self._each(of_one))
        # A run of one tower alone must not leave the others a batch behind.
        with tf.control_dependencies([tensors[0].op for tensors in taken.values()]):
            found = []
            for index, position in self.places:
                with tf.device(self._devices[index]):
                    found.append(tf.identity(taken[index][position]))
        return found


def _tensors(shards):
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


def _tensors_alone(shards):
    return [tensor for _, tensor in _tensors(shards)]


def _shards_of(cut, taken):
    """`Shards` as `cut`, of the tensors that came out of the buffers."""
    instead = {}
    for (_, old), new in zip(_tensors(cut), taken):
        new.set_shape(old.shape)
        instead[id(old)] = new

    def leaf(old):
        if old is None:
            return None
        if isinstance(old, tf.SparseTensor):
            static = old.shape.as_list() if old.shape.ndims is not None else None
            return sparse_placeholder(*[instead[id(part)] for part in (
                old.indices, old.values, old.dense_shape)], static=static)
        new = instead[id(old)]
        with tf.device(new.device):
            return tf.placeholder_with_default(new, old.shape)
    inputs = [tf.nest.pack_sequence_as(nest, [leaf(old) for old in tf.nest.flatten(nest)])
              for nest in cut.inputs]
    return Shards(inputs, [instead.get(id(size), size) for size in cut.sizes],
                  [instead.get(id(weight), weight) for weight in cut.weights],
                  instead.get(id(cut.batch_size), cut.batch_size))
