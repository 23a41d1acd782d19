"""How far a run is, by its newest checkpoint, and where it ends."""

import collections
import contextlib
import math
import os

from datasets.epochs import Epochs
import towers
from towers.checkpoint.files import counter_in, reader_of
from trainer.cluster import examples_a_step, saves
from trainer.flags import FLAGS, train_dir


class Position(collections.namedtuple('Position', 'step examples')):
    """How far a run is: steps done, and examples taken from the stream of all epochs (ints)."""
    __slots__ = ()


START = Position(0, 0)


def find_position(cluster=None):
    """The `Position` of the run in --train_dir, from its newest checkpoint; `START` of a new run,
    and for --plan_only.

    All workers of a cluster need it, since the end of the schedule and of the run is counted from
    there. The chief locks the folder while it looks. A worker that does not share the folder begins
    at 0.

    Raises:
      CheckpointError: the newest checkpoint is damaged.
      RunLockedError: another process has the folder.
    """
    if FLAGS.plan_only or not os.path.isdir(train_dir()):
        return START
    with towers.hold_directory(train_dir()) if saves(cluster) else contextlib.nullcontext():
        newest = towers.newest_checkpoint(train_dir(), FLAGS.recover)
    # A checkpoint of another program is refused, by name, before anything is restored.
    if newest is None or not all(reader_of(newest.prefix).has_tensor(name)
                                 for name in ('global_step', 'examples_seen')):
        return START
    return Position(*(counter_in(newest.prefix, name) for name in ('global_step', 'examples_seen')))


def epochs_of(setup, cluster):
    """The `Epochs` that the steps of all workers go through."""
    return Epochs(setup.dataset.num_examples['train'],
                  examples_a_step(cluster, setup.batch_size), FLAGS.remainder)


def end_of_run(epochs, position):
    """The last step of the run, and the place in the stream of examples after it (two ints).

    Counted from `position`: the steps before it may have had another batch size, and the batches
    from there on begin at its place. --train_epochs are passed over when each of their examples has
    been given; the step that gives the last one is done whole, as in a run without a stop, so where
    an epoch's last batch is carried over it may take some of the next epoch.
    """
    # In floats 0.07 * 100 is more than 7, which would be a step more.
    end = math.ceil(round(FLAGS.train_epochs * epochs.length, 6))
    train_steps = FLAGS.train_steps or position.step + epochs.steps(position.examples, end)
    return train_steps, epochs.place_after(position.examples, max(0, train_steps - position.step))
