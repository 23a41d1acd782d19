"""Each tower's next shard, on its device before the tower needs it.

Every tower has a buffer on its device (TF's `Stage` and `Unstage`). A step takes batch t out of the
buffers and, while the towers work on it, reads batch t + 1 from the program's own iterator, cuts
it, and puts the shards in. In the step's graph:

    lock     wait until no other run of the session is between here and `read`
    settle   if a second set of buffers, `kept`, holds a batch: put it back   (after a failed step)
    prime    if a buffer is empty: get_next, cut, put in          (the first step; after the end)
    take     each tower's shard out of its buffer                 (after `prime`)
    keep     put the shards into `kept`                           (after `take`)
    read     get_next_as_optional; if there is a batch, cut it and put it in; empty `kept`
                                                                  (after `keep`)
    unlock                                                        (after `read`)

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

from towers.tower.input_way import initializers, inputs_from, way_of
from towers.tower.shards import Shards, sparse_placeholder, split_batch, with_sparse_tensors
from towers.tower.staged_buffers import Buffers, tensors_of
from towers.tower.staged_guard import check_alone, guard_reads, mark_use, prevent_feeding
from towers.tower.staged_lock import Lock
from towers.tower.staged_owner import Owner, empty_before, is_full, merge, switch

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
        prefix = scope.replace('/', '_')
        buffers = Buffers(cut, devices, prefix)
        kept = None if keeps_first else Buffers(cut, devices, prefix + 'kept_')
        with tf.device('/cpu:0'):
            owner = Owner(reads, buffers.name + 'robbed')
            with tf.control_dependencies([guard_reads(reads)]):
                lock = Lock(buffers.name + 'lock')
            with tf.control_dependencies([lock.acquired]):
                empty, fresh, is_retried = _settled(buffers, kept, owner)
            primed = _primed(inputs, reads, region, buffers, owner, empty, remainder, len(devices),
                             called)
        # A run of the loss alone stages nothing, and gives the lock back here.
        taken = buffers.take([primed], keeps_first, owner.check, lock.held_until)
        read, staged, use, given = None, None, None, taken
        if not keeps_first:
            given, use = mark_use(taken, name)
            with tf.device('/cpu:0'):
                with tf.control_dependencies([fresh]):
                    keep = kept.put(taken, owner.name)
                read, done = _read_next(inputs, reads, region, buffers, owner, keep, remainder,
                                        len(devices), called)
                with tf.control_dependencies([done]):
                    cleared = kept.clear()
                with tf.control_dependencies([cleared]):
                    done = tf.identity(done.outputs[0])
                with tf.control_dependencies([tensor.op for tensor in taken]):
                    reads_nothing = tf.identity(is_retried)
                staged = lock.held_until([merge(done, reads_nothing, 'staged').op])
        shards = _shards_of(cut, given)
        prevent_feeding(inputs)
        empty_before(initializers(reads), owner, [
            held for held in (buffers, kept) if held is not None])
    return shards, StagedInputs(read, staged, use, None)


def _settled(buffers, kept, owner):
    """Puts the batch back that a failed step has left in `kept`; else empties `kept`.

    A step that failed while it filled buffers leaves some of them empty: what is in the others is
    given up. So is a batch of another owner.

    Args:
      buffers: `Buffers` that the towers take from.
      kept: `Buffers`; None where nothing is read ahead.
      owner: `Owner`.

    Returns:
      `(empty, fresh, is_retried)`: whether a batch has to be read first, a bool tensor that is
      there when all is settled; a tensor that is alive where no batch is put back, and one that is
      where one is. Both are None without `kept`.
    """
    full = is_full(buffers.sizes())
    own = owner.holds(buffers, full)
    if kept is None:
        lacks, is_ready = switch(own, own)
        with tf.control_dependencies([lacks]):
            checked = owner.check_not_robbed()
        with tf.control_dependencies([lacks, checked]):
            noted = owner.note_robbed(buffers, tf.logical_and(full, tf.logical_not(own)))
        with tf.control_dependencies([noted]):
            empty = tf.logical_not(lacks)
        return merge(empty, tf.logical_not(is_ready), 'empty'), None, None
    kept_sizes = kept.sizes()
    ready = tf.logical_and(own, tf.reduce_all(tf.equal(kept_sizes, 0)))
    unsettled, is_ready = switch(ready, ready)  # ready: each step after a step that succeeded
    with tf.control_dependencies([unsettled]):
        checked = owner.check_not_robbed()
    with tf.control_dependencies([unsettled, checked]):
        retried, empty = _unsettled(buffers, kept, owner, full, own, is_full(kept_sizes))
    nothing = tf.logical_not(is_ready)
    retried = merge(retried, nothing, 'retried')
    fresh, is_retried = switch(retried, retried)
    return merge(empty, nothing, 'empty'), fresh, is_retried


def _unsettled(buffers, kept, owner, full, own, kept_full):
    """`_settled` in a step that is not after one that succeeded: `(retried, empty)`."""
    kept_own = owner.holds(kept, kept_full)
    noted = [owner.note_robbed(held, tf.logical_and(any_batch, tf.logical_not(own_batch)))
             for held, any_batch, own_batch in ((buffers, full, own), (kept, kept_full, kept_own))]
    with tf.control_dependencies(noted):
        retried = tf.logical_and(kept_own, tf.logical_not(own))
        fresh, is_retried = switch(retried, retried)
    with tf.control_dependencies([is_retried]):
        with tf.control_dependencies([buffers.clear()]):
            put = buffers.put(kept.take(), owner.name)
    with tf.control_dependencies([put]):
        put_back = tf.identity(is_retried)
    with tf.control_dependencies([fresh]):
        cleared = kept.clear()
    with tf.control_dependencies([cleared]):
        nothing_kept = tf.identity(fresh)
    retried = merge(put_back, nothing_kept, 'settled')
    return retried, tf.logical_not(tf.logical_or(own, retried))


def _primed(inputs, reads, region, buffers, owner, empty, remainder, num_shards, called):
    """Reads a batch if the buffers are `empty`: the operation after which they are full."""
    not_empty, is_empty = switch(empty, empty)
    handles = {read: switch(read.inputs[0], empty)[1] for read in reads}
    with tf.control_dependencies([is_empty]):
        first = {read: tf.raw_ops.IteratorGetNext(
            iterator=handles[read], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs],
            name='first/IteratorGetNext') for read in reads}
        with tf.control_dependencies([buffers.clear()]):
            put = _put(buffers, owner, split_batch(
                inputs_from(first, inputs, region, is_empty, 'prime'), num_shards, remainder,
                called=called))
    with tf.control_dependencies([put]):
        primed = tf.identity(is_empty)
    return merge(primed, not_empty, 'primed').op


def _read_next(inputs, reads, region, buffers, owner, keep, remainder, num_shards, called):
    """Reads the next batch, after `keep`: `(operation that reads, operation after which it is
    staged or the data have ended)`."""
    with tf.control_dependencies([keep]):
        optionals = [tf.raw_ops.IteratorGetNextAsOptional(
            iterator=read.inputs[0], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs],
            name='next/IteratorGetNextAsOptional') for read in reads]
    has = [tf.raw_ops.OptionalHasValue(optional=optional) for optional in optionals]
    has_all = has[0] if len(has) == 1 else tf.reduce_all(tf.stack(has))
    ended, goes_on = switch(has_all, has_all)
    present = {read: switch(optional, has_all)[1] for read, optional in zip(reads, optionals)}
    with tf.control_dependencies([goes_on]):
        values = {read: tf.raw_ops.OptionalGetValue(
            optional=present[read], output_types=[out.dtype for out in read.outputs],
            output_shapes=[out.shape for out in read.outputs], name='value') for read in reads}
        put = _put(buffers, owner, split_batch(
            inputs_from(values, inputs, region, goes_on, 'ahead'), num_shards, remainder,
            called=called))
    with tf.control_dependencies([put]):
        goes_on = tf.identity(goes_on)
    done = merge(goes_on, ended, 'read').op
    last = optionals[0].op
    if len(optionals) > 1:
        with tf.control_dependencies([optional.op for optional in optionals]):
            last = tf.no_op('next_read')
    return last, done


def _put(buffers, owner, shards):
    return buffers.put([tensor for _, tensor in tensors_of(shards)], owner.name)


def _shards_of(cut, taken):
    """`Shards` as `cut`, of the tensors that came out of the buffers."""
    instead = {}
    for (_, old), new in zip(tensors_of(cut), taken):
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
