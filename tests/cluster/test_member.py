"""What a worker makes of an error of its step, and the chief of another session; joining itself is
in the tests of each kind."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import member
from towers.nonfinite import NonFiniteError
from one_process import addresses, halving, serve, together, train

ERRORS = tf.errors


@pytest.mark.parametrize('kind, text, awaited', [
    (ERRORS.InvalidArgumentError, 'assertion failed: [the label 2: expected 0 to 1]', False),
    (ERRORS.InvalidArgumentError, '2 root error(s) found.\n  (0) INVALID_ARGUMENT: the label is 2\n'
     '\t [[{{node Assert}}]]\n  (1) CANCELLED: RecvBuf was cancelled', False),
    (ERRORS.InvalidArgumentError, 'failed while calling RecvBuf of the remote target', True),
    (ERRORS.UnavailableError, 'Socket closed', True), (ERRORS.CancelledError, 'CANCELLED', True)])
def test_only_errors_that_may_be_a_peers_wait_for_its_loss(kind, text, awaited):
    """Others end the worker at once; or an error of all would take 31 seconds."""
    assert member._may_be_a_peers(kind(None, None, text)) is awaited


def test_nan_of_a_step_is_an_error_of_its_own():
    with pytest.raises(NonFiniteError,
        match='^the loss of tower 1 is NaN. Nothing of it was saved'):
        with member._explained_in_words():
            raise ERRORS.InvalidArgumentError(
                None, None, 'From /job:worker/replica:0/task:1:\n'
                'towers-nonfinite[the loss of tower 1] : Tensor had NaN values')


def test_a_first_server_that_was_lost_is_told_again_what_the_chief_trains(monkeypatch):
    """A worker that is started after it would wait for the chief in vain."""
    told = []
    monkeypatch.setattr(member, 'agree', lambda cluster, *unused: told.append(cluster.rank))
    cluster = serve(1)(0)
    built = halving(cluster, global_step=tf.train.get_or_create_global_step())
    errors = [tf.errors.AbortedError(None, None, 'the server is gone')]

    class Lose(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            if errors:
                raise errors.pop()
    said = []
    with towers.join(cluster, built, on_lost=lambda error: None, say=said.append) as joined:
        with joined.session([Lose()]) as session:
            session.run(built.train_op)
    assert told == [0, 0]
    assert said == ['beginning anew worker 0 (%s), the chief, has lost its session with the '
                    'servers, and begins again at step 0' % cluster.workers[0]]


@pytest.mark.slow
def test_a_ring_whose_workers_have_other_variables_says_so():
    """They would wait for each other at the start of the session, without a word."""
    workers = addresses(2)

    def model_fn(x):
        return tf.reduce_mean(x * tf.get_variable('w', [], initializer=tf.ones_initializer()))

    def work(rank, collections):
        def on_build(built):
            tf.get_variable('both', [])
            if rank == 0:
                tf.get_variable('best', [], collections=collections)
        try:
            return train(towers.Cluster('ring', workers, rank=rank), model_fn,
                         (np.ones([2], np.float32),), lambda: tf.train.GradientDescentOptimizer(.5),
                         on_build=on_build)['last']['w']
        except towers.TowersError as error:
            return str(error)
    found = together(lambda rank: work(rank, None), 2)
    for text in found:  # one may hear of the other's before it says its own
        assert re.search('the workers have other variables, besides those of the model; this one '
                         'has (best, )?both, global_step: ', text), found
    workers = addresses(2)
    assert together(lambda rank: work(rank, [tf.GraphKeys.LOCAL_VARIABLES]), 2) == [0., 0.]
