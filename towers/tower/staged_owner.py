"""Whose a staged batch is: that of the iterators which it was read from.

On a `tf.train.Server` buffers outlive a session, and all sessions of the server find them.
Iterators do not: in a session that is made anew each begins at its first batch, and a batch that is
still staged is one of another place in the data. So each batch is staged with its iterators'
handles, in which TensorFlow gives an iterator that is private to its session a name that no other
has. (An iterator with a `shared_name` is the server's, as the buffers are: its batch is always the
right one.)

A batch of another owner is mostly what a session has left behind which has ended, and is thrown
away. It may as well be that of another session of this graph which goes on, in turns with this one.
That would then miss a batch: so its owner is noted, and fails when it comes for it.
"""

import tensorflow.compat.v1 as tf

from towers import compat

EMPTIED = 'emptied'  # the name of what empties buffers before an initializer
TURNS = ('stage_inputs: a second session of this graph has taken steps on the same server, and '
          'has thrown away the batch that was staged for this one. Give tf.Session a config with '
          'isolate_session_state=True, or each session a graph of its own; or leave stage_inputs '
          'out.')


class Owner:
    """The iterators of the session that a step runs in.

    Attributes:
      name: string scalar, that of no other session's iterators.
    """

    def __init__(self, reads, table):
        """
        Args:
          reads: the program's own `IteratorGetNext`s.
          table: name of the table of those whose batch was thrown away.
        """
        self._table = table
        handles = []
        for read in reads:
            with tf.device(None), tf.get_default_graph().colocate_with(read.inputs[0].op):
                handles.append(tf.raw_ops.IteratorToStringHandle(resource_handle=read.inputs[0]))
        self.name = handles[0] if len(handles) == 1 else tf.raw_ops.StringJoin(inputs=handles)

    def holds(self, buffers, full):
        """Whether there is a batch in the buffers (`full`, a bool tensor) and it is this one's."""
        empty, is_full = switch(full, full)
        with tf.control_dependencies([is_full]):
            owner = buffers.owner()
        return merge(tf.equal(owner, self.name), empty)

    def check(self, owner):
        """An operation that fails if a batch is another one's."""
        with tf.device('/cpu:0'):
            return tf.raw_ops.Assert(condition=tf.equal(owner, self.name), data=[TURNS])

    def check_not_robbed(self):
        """An operation that fails if another session has thrown away a batch of this one's."""
        robbed = tf.raw_ops.LookupTableFindV2(
            table_handle=self._robbed(), keys=self.name, default_value=False)
        return tf.raw_ops.Assert(condition=tf.logical_not(robbed), data=[TURNS])

    def note_robbed(self, buffers, foreign):
        """Notes, where `foreign`, that the owner of a batch has lost it: an operation."""
        nobodys, is_foreign = switch(foreign, foreign)
        with tf.control_dependencies([is_foreign]):
            noted = tf.raw_ops.LookupTableInsertV2(
                table_handle=self._robbed(), keys=buffers.owner(), values=True)
        with tf.control_dependencies([noted]):
            return merge(tf.identity(is_foreign), nobodys).op

    def empty(self, all_buffers):
        """Empties buffers, all but of a batch of another session's: an operation.

        The iterators begin anew, and miss nothing.
        """
        cleared = []
        for buffers in all_buffers:
            full = is_full(buffers.sizes())
            foreign = tf.logical_and(full, tf.logical_not(self.holds(buffers, full)))
            own, others = switch(foreign, foreign)
            with tf.control_dependencies([own]):
                done = buffers.clear()
            with tf.control_dependencies([done]):
                cleared.append(merge(tf.identity(own), others))
        with tf.control_dependencies(cleared):
            return tf.raw_ops.LookupTableInsertV2(
                table_handle=self._robbed(), keys=self.name, values=False)

    def _robbed(self):
        return tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.bool,
                                             container='', shared_name=self._table)


def empty_before(initializers, owner, all_buffers):
    """Makes the initializers of iterators empty the buffers, which hold a batch of the old data.

    They do so when the new dataset is made: where it cannot be, the iterator goes on as before, and
    so does what is staged.

    Args:
      initializers: list of `MakeIterator`s.
      owner: `Owner`.
      all_buffers: list of `Buffers`.
    """
    for each in initializers:
        with tf.control_dependencies(None), tf.control_dependencies([each.inputs[0].op]), \
                tf.device('/cpu:0'):
            emptied = tf.group(owner.empty(all_buffers), name=EMPTIED)
        compat.add_control_inputs(each, [emptied])


def empties(initializer):
    """Whether an initializer empties buffers first."""
    return any(other.name.rsplit('/', 1)[-1].startswith(EMPTIED)
               for other in initializer.control_inputs)


def is_full(sizes):
    """Whether all buffers of these sizes hold a batch: a bool tensor."""
    return tf.reduce_all(tf.greater(sizes, 0))


def switch(data, pred):
    """`data` twice: alive where `pred` is false, and where it is true.

    Operations that wait for the `Switch` itself run in either case; they wait for the identities.
    """
    found = tf.raw_ops.Switch(data=data, pred=pred)
    return tf.identity(found.output_false), tf.identity(found.output_true)


def merge(one, other, name=None):
    """That of two tensors which is alive."""
    return tf.raw_ops.Merge(inputs=[one, other], name=name).output
