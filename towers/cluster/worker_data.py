"""How a worker goes on when its data end before those of others."""

import collections
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_instance
from towers.errors import InputError

Feed = collections.namedtuple('Feed', 'inputs active initializer')
Feed.__doc__ = """A worker's batches.

Attributes:
  inputs: the tensors of a batch, for `build_towers`.
  active: float32 scalar, for `cluster._replace(active=…)`: 0 when this worker has no batch left.
  initializer: operation that begins the data. Sessions of `Member` and `tf.train.MonitoredSession`
    run it themselves, with the tables' initializers.
"""


def until_all_end(dataset: typing.Any) -> Feed:
    """Batches until the last worker's data ends; a worker without data does not hold up the rest.

        feed = towers.until_all_end(dataset.shard(cluster.num_workers, cluster.rank))
        cluster = cluster._replace(active=feed.active)
        built = towers.build_towers(model_fn, feed.inputs, optimizer, cluster=cluster)

    A worker whose data has ended computes its first batch again, of which no gradient is left
    (sparse ones have no row), and leaves out its updates that ride on the train op (`UPDATE_OPS`).
    The step in which no worker has data raises
    `tf.errors.OutOfRangeError` on all of them, as the end of the data does, and changes nothing.
    Neither goes for what the forward pass itself writes, see `inline_updates`.

    Use it on all workers, or on none. Asynchronous workers need no such thing, and `Cluster`
    refuses `active` there: each ends with its own data.

    Args:
      dataset: a `tf.data.Dataset` of batches, this worker's; at least one.

    Returns:
      `Feed`.

    Raises:
      InvalidArgumentError: `dataset` is no `tf.data.Dataset`.
      InputError: within `join`, in the first step: the dataset is empty.
    """
    check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')

    def marked(active):
        return lambda *batch: (batch if len(batch) > 1 else batch[0],
                               tf.constant(active, tf.float32))
    with tf.device('/cpu:0'):
        first = dataset.take(1).cache().repeat()
        iterator = tf.data.make_initializable_iterator(
            dataset.map(marked(1.)).concatenate(first.map(marked(0.))))
        # The data end only if the data set is empty.
        batch = tf.data.experimental.get_next_as_optional(iterator)
        with tf.control_dependencies([tf.raw_ops.Assert(
                condition=batch.has_value(), data=[_EMPTY])]):
            batch = tf.nest.map_structure(tf.identity, batch.get_value(), expand_composites=True)
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return Feed(batch[0], batch[1], iterator.initializer)


_EMPTY = 'towers: no batch for until_all_end'
_TOO_FEW = re.compile(r'towers: (a batch for \d+ [\w-]+ needs at least \d+ examples and has)'
                      r'\]? \[?(\d+)')  # of `split_batch`


def explained(error):
    """The `InputError` for TensorFlow's error of a step without any data; None for another one."""
    few = _TOO_FEW.search(str(error))
    if few is not None:
        return InputError('%s %s, on this worker: give each worker some in every step. One whose '
                          'data end before those of others goes on by until_all_end(dataset), and '
                          'weighs nothing then.' % few.groups())
    return InputError(
        'the data set that this worker gave to until_all_end has no batch: expected one at least, '
        'to compute with weight 0 when its data have ended. Share out examples by dataset.shard('
        'cluster.num_workers, cluster.rank), or leave the last part of a batch in: batch(…, '
        'drop_remainder=False).') if _EMPTY in str(error) else None
