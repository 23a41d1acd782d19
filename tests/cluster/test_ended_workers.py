"""A worker that has ended in good order, and one that is only gone, on parameter servers."""

import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.ended_workers import EndedWorkers
from towers.cluster.member import start_server
from towers.errors import WorkerLostError
from one_process import addresses, let_workers_come_again


class Gone(Exception):
    """What ends a worker before the others."""


@pytest.mark.slow
@pytest.mark.parametrize('in_good_order', [True, False])
def test_a_worker_that_has_ended_is_named_and_one_that_is_gone_is_waited_for(
        in_good_order, monkeypatch):
    """Of three steps the second worker does two, and the third when it is started again."""
    let_workers_come_again(monkeypatch)
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    ended = EndedWorkers(make('worker', 0), server.target, make('ps', 0).session_config(
        tf.ConfigProto()))
    lost, said, told, spoke = [], [], threading.Event(), threading.Event()

    def lose(error):
        lost.append(error)
        told.set()

    def say(line):
        said.append(line)
        spoke.set()

    def work(rank, steps, ends=True):
        with tf.Graph().as_default():
            cluster = make('worker', rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer(), use_resource=True),
                tf.constant(np.array([1. + rank])), tf.train.GradientDescentOptimizer(1.), 1,
                'mean', cluster=cluster)
            with towers.join(cluster, built, dead_after=1., say=say,
                             on_lost=lose) as joined:
                with joined.session() as session:
                    for _ in range(steps):
                        session.run(built.train_op)
                    if rank:
                        assert ended() == []
                    if not ends:
                        raise Gone('a reason')
                    if rank == 0:
                        results.append(session.run_step_fn(
                            lambda step_context: step_context.session.run(built.variables[0])))
    results = []
    chief = threading.Thread(target=work, args=(0, 3), daemon=True)
    chief.start()
    if in_good_order:
        work(1, 2)
        assert told.wait(30)
        [error] = lost
        assert isinstance(error, WorkerLostError)
        assert str(error).startswith(
            'worker 1 (%s) has ended its training, perhaps for lack of data, and worker 0 (%s) has '
            'not' % tuple(workers[::-1]))
        assert not said  # not: worker 1 does not answer, start it again
    else:
        with pytest.raises(Gone):
            work(1, 2, ends=False)
        assert spoke.wait(30)
        assert not told.wait(1.)
        [line] = said
        assert line.endswith('the step takes more than 1 seconds; worker 1 (%s) has ended: Gone: '
                             'a reason. When that is mended, start it again, and the run goes on'
                             % workers[1])
    assert ended() == [1] * in_good_order
    work(1, 1)  # started again: it is no longer one that has ended, until it has
    chief.join(30)
    assert results == [-4.5]  # three times the mean of 1 and 2
    assert ended() == [1]
