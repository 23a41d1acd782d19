"""What became of each worker of parameter servers: it has joined, was refused, or has failed.

The workers of a ring are connected with worker 0, which hears all of this. Those of parameter
servers know each other by the servers alone, so a worker notes it in a variable on the first one.
The variable is found by its name from every graph. Only the chief makes it; a worker that finds
none has nobody to tell.
"""

import collections
import threading

import tensorflow.compat.v1 as tf

from towers.cluster.ports import answers
from towers.placement.variable_device import only_device

FIRST_SERVER = '/job:ps/task:0/device:CPU:0'
JOINED, REFUSED, FAILED = 'joined', 'refused', 'failed'
_NAME = 'towers_worker_notes'
_MOST = 500  # characters of a reason
_SECONDS = 3.  # in which a note can be made; TensorFlow waits without end for a lost server


class Note(collections.namedtuple('Note', ['kind', 'why'])):
    """What a worker has noted: `kind` is `JOINED`, `REFUSED`, `FAILED`, or `''` of one that has not
    come; `why` is the reason, a text."""
    __slots__ = ()


def note(cluster, kind, why=''):
    """The operation by which a worker notes something; not before the chief's `begin_notes`."""
    with only_device(FIRST_SERVER):
        return tf.raw_ops.ResourceScatterUpdate(
            resource=_handle(cluster), indices=tf.constant([cluster.rank]),
            updates=tf.constant([_text(kind, why)]))


def begin_notes(cluster, session, forget):
    """Makes the notes, on the chief: it has joined itself.

    Args:
      cluster, session: of the chief.
      forget: whether workers that have joined are of another run. In the same run, whose chief is
        started again, they are known to have been there. What failed before is forgotten anyway.
    """
    with only_device(FIRST_SERVER):
        handle = _handle(cluster)
        is_there = tf.raw_ops.VarIsInitializedOp(resource=handle)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.string)
        texts = tf.placeholder(tf.string, [cluster.num_workers])
        write = tf.raw_ops.AssignVariableOp(resource=handle, value=texts)
    kept = [_text('')] * cluster.num_workers
    if not forget and session.run(is_there):
        kept = [text if _note(text).kind == JOINED else _text('') for text in session.run(value)]
    session.run(write, {texts: [_text(JOINED)] + kept[1:]})


def noted(cluster):
    """A tensor of what all workers have noted, for `notes_of`; an error before `begin_notes`."""
    with only_device(FIRST_SERVER):
        return tf.raw_ops.ReadVariableOp(resource=_handle(cluster), dtype=tf.string)


def notes_of(value):
    """Dict from ranks to `Note`s, of the value of `noted`."""
    return {rank: _note(text) for rank, text in enumerate(value)}


def note_failure(cluster, target, config, why):
    """Notes that this worker has failed, and why, if the first server takes it within seconds."""
    def make():
        try:
            with tf.Graph().as_default():
                operation = note(cluster, FAILED, why)
                with tf.Session(target, config=only_first(config)) as session:
                    session.run(operation)
        except tf.errors.OpError:
            pass  # the server has been started again meanwhile
    if answers(cluster.ps[0]) is not True:
        return
    thread = threading.Thread(target=make, daemon=True, name='towers-note')
    thread.start()
    thread.join(_SECONDS)


def only_first(config):
    """A copy of a session's `tf.ConfigProto` for a session that needs no server but the first.

    TensorFlow would wait for all of them to make it.
    """
    changed = tf.ConfigProto()
    changed.CopyFrom(config)
    others = [each for each in changed.device_filters if not each.startswith('/job:ps')]
    del changed.device_filters[:]
    changed.device_filters.extend(['/job:ps/task:0'] + others)
    return changed


def _handle(cluster):
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[cluster.num_workers], shared_name=_NAME)


def _text(kind, why=''):
    return ('%s %s' % (kind, why[:_MOST])).encode('utf-8')


def _note(text):
    kind, _, why = text.decode('utf-8', 'replace').partition(' ')
    return Note(kind, why)
