"""What a proof is asked about a build: what the build does to the losses of its towers, and which
operations write the variables that the losses read."""

import itertools
import typing

import tensorflow.compat.v1 as tf

Writers = typing.Mapping[str, typing.Sequence[tf.Operation]]
"""{name of a variable: the operations of a step that write it}."""

NO_WRITERS: Writers = {}


class Question(typing.NamedTuple):
    """What a build does to the losses of its towers."""
    adds_shards: bool  # whether the losses of the shards are added up, each with the weight 1
    static_size: typing.Optional[int]  # the static number of examples of a shard
    part_name: str  # the name of a part of the batch: 'tower', 'micro-batch', 'machine'
    # By what the gradient of a loss that is a mean over the examples is multiplied: 1, or the
    # number of towers; None where shards of different sizes count alike.
    gradient_factor: typing.Optional[int] = 1
    # Of the variables that the loss reads, the writers
    # of those that tower 0 writes for all towers;
    writers_by_tower_0: Writers = NO_WRITERS
    # and of those that each tower has for itself.
    writers_by_each_tower: Writers = NO_WRITERS
    # The writers of all variables that every tower writes in its turn, whatever the value
    # (`update_ops='all'`).
    writers_in_turn: Writers = NO_WRITERS
    # Where a step has several machines that do not share their variables: the writers of those to
    # which every tower of a machine adds its examples in turn.
    writers_of_machine: Writers = NO_WRITERS
    # All writers of the variables that the update reads beside the gradients, as for its learning
    # rate.
    writers_for_update: Writers = NO_WRITERS
    # The writers of the variables that tower 0 writes for all towers, and that neither the loss nor
    # the update reads; and the marks (`State.shard_statistics`) of all losses of the build.
    other_writers: Writers = NO_WRITERS
    statistics_of_losses: typing.AbstractSet[str] = frozenset()
    # Names of variables whose initial values are computed from the examples of a shard.
    initialized_from_shard: typing.Sequence[str] = ()
    # Names of variables that a transformation of the gradients reads, and an update op writes.
    transformed_by: typing.Sequence[str] = ()
    # Names of counters of metrics, to which the towers add one after the other, that the loss or
    # the update reads.
    counters_read: typing.Sequence[str] = ()
    # Names of variables whose sparse gradients may have other rows twice than on one device, where
    # a transformation of the gradients, or an optimizer that is not TensorFlow's, sees the rows.
    rows_counted: typing.Sequence[str] = ()
    # Names of reference variables that a gradient may read before an update op writes them, or
    # after the write.
    read_in_any_order: typing.Sequence[str] = ()

    @property
    def writers_for_loss(self) -> typing.List[tf.Operation]:
        """The operations that write the variables which the loss reads; and with `update_ops='all'`
        all that every tower writes."""
        operations: typing.List[tf.Operation] = []
        for writers in (self.writers_by_tower_0, self.writers_in_turn, self.writers_by_each_tower):
            operations += itertools.chain.from_iterable(writers.values())
        return operations
