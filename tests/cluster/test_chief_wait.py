"""Workers of parameter servers whose chief fails, or is gone, before its first session."""

import contextlib
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import chief_wait
from towers.cluster.chief_wait import AwaitedChief
from towers.cluster.worker_notes import FAILED, JOINED, Note
from towers.errors import WorkerLostError
from one_process import serve, together

CLUSTER = towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], rank=1)


@pytest.mark.parametrize('notes, answer, start_timeout, why', [
    ([Note(JOINED, ''), Note(FAILED, 'OSError: no such folder.')], True, 60.,
     'it has ended: OSError: no such folder. When'),
    ([Note(FAILED, 'of an earlier start')], True, 60., None),  # it may come again
    ([Note(JOINED, '')], None, .001, 'its process is frozen'),
    ([Note(JOINED, '')], True, .001, None),  # it restores a large checkpoint, say
    ([None], False, .001, 'it does not answer')])  # neither does the server
def test_when_a_worker_gives_up(monkeypatch, notes, answer, start_timeout, why):
    def asked():
        note = notes.pop(0) if len(notes) > 1 else notes[0]
        asked.notes = None if note is None else {0: note, 1: Note(JOINED, '')}
    notes, asked.notes = list(notes), None
    monkeypatch.setattr(chief_wait, '_PAUSE', 0.)
    monkeypatch.setattr(chief_wait, 'answers', lambda address: answer)
    chief = AwaitedChief(CLUSTER, asked, start_timeout, print)
    time.sleep(.002)
    with contextlib.nullcontext() if why is None else pytest.raises(WorkerLostError, match=(
            r'worker 1 \(b:2\) cannot begin: the session of worker 0 \(a:1\), the chief, has not '
            'begun.*' + why)):
        for _ in range(3):
            chief.look()


@pytest.mark.slow
@pytest.mark.parametrize('synchronous', [True, False])
def test_a_chief_that_fails_before_its_session_ends_the_others(synchronous):
    cluster_of, errors = serve(2, synchronous=synchronous), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), tf.ones([4]),
                tf.train.GradientDescentOptimizer(.1), 1, 'mean', cluster=cluster)
            with pytest.raises((WorkerLostError, IOError)) as raised:
                with towers.join(cluster, built, start_timeout=5., say=lambda line: None) as joined:
                    if cluster.is_chief:
                        time.sleep(1.)
                        raise IOError('no such folder')
                    with joined.session() as session:
                        session.run(built.train_op)
            errors.append((rank, str(raised.value)))
    together(work, 2)
    assert dict(errors)[0] == 'no such folder'
    assert dict(errors)[1].startswith('worker 1 (%s) cannot begin' % cluster_of(0).workers[1])
    assert 'it has ended: OSError: no such folder' in dict(errors)[1]
