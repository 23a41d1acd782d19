"""How a session of a cluster is made, and how it ends when a worker ends before the others."""

import contextlib
import re
import signal
import threading
import time
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import member
from towers.cluster.machines import connection_of, note_connection
from towers.errors import ClusterError, NonFiniteError, WorkerLostError
from towers.nonfinite import explained
from one_process import StopWithoutSignals, addresses, halving, in_sessions, serve, together, train


def make_clusters(kind):
    """A function from a rank to its `Cluster` of two."""
    if kind == 'ring':
        workers = addresses(2)
        return lambda rank: towers.Cluster('ring', workers, rank=rank)
    return serve(2, synchronous=kind == 'ps')


def steps_of(cluster, make_session):
    """The weights before, between and after two steps in a session of a worker's own making."""
    with tf.Graph().as_default():
        built = halving(cluster, global_step=tf.train.get_or_create_global_step())
        lost, values = [], []
        try:
            with towers.join(cluster, built, start_timeout=30., dead_after=20.,
                             on_lost=lost.append) as member, make_session(member) as session:
                for place in range(3):
                    values.append(session.run(built.variables[0]))
                    if place < 2:
                        session.run(built.train_op)
        except towers.TowersError as error:
            return str(error)
        assert not lost
        return values


@pytest.mark.parametrize('kind', [
    'ring', pytest.param('ps', marks=pytest.mark.slow)])
def test_steps_in_a_plain_session_are_refused(kind):
    """Each worker would go on from its own initial value."""
    cluster_of = make_clusters(kind)

    def plain(member):
        session = tf.Session(member.target, config=member.config)
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session
    for text in together(lambda rank: steps_of(cluster_of(rank), plain), 2):
        assert 'in a session that has not begun as those of a cluster do' in text, text
        assert 'Make it by member.session(hooks), or' in text


def monitored(member):
    """The idiom of programs for TensorFlow's parameter servers; one of the hooks makes a variable,
    and the program starts its metrics anew."""
    class Metrics(tf.train.SessionRunHook):
        def begin(self):
            self.reset = tf.local_variables_initializer()

        def after_run(self, run_context, run_values):
            run_context.session.run(self.reset)
    return tf.train.MonitoredTrainingSession(
        member.target, member.is_chief, hooks=member.hooks + [
            Metrics(), tf.train.StopAtStepHook(num_steps=9)], config=member.config)


@pytest.mark.slow
def test_a_monitored_training_session_trains_in_a_ring():
    """The others would wait for the chief to initialise what is theirs alone."""
    cluster_of = make_clusters('ring')
    found = together(lambda rank: steps_of(cluster_of(rank), monitored), 2)
    assert found == [[8., 4., 2.]] * 2


@pytest.mark.slow
@pytest.mark.parametrize('leaves', [0, 1])
def test_in_a_ring_one_worker_ends_each_session(leaves):
    """TensorFlow counts steps beyond sessions, and does not count the one that was not made. Each
    session begins anew."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = halving(cluster)
            seen = []
            with towers.join(cluster, built, start_timeout=30., dead_after=10.) as member:
                for steps in (3, 2):
                    stop, made = StopWithoutSignals(cluster, built), 0
                    with member.session([stop]) as session:
                        while not session.should_stop() and (rank != leaves or made < steps):
                            session.run(built.train_op)
                            made += 1
                            value = session.run(built.variables[0])
                    seen.append((made, stop.is_told, value))
            return seen
    assert together(work, 2) == [[(3, True, 1.), (2, True, 2.)]] * 2


@pytest.mark.parametrize('synchronous', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_parameter_servers_take_one_session_that_the_member_makes(graph, synchronous):
    """Else all operations of all workers would be on the first server."""
    cluster = serve(1, synchronous=synchronous)(0)
    built = halving(cluster)
    with towers.join(cluster, built, start_timeout=30.) as member:
        with pytest.raises(ClusterError, match='this session is not made by the member of the'):
            monitored(member)
        with member.session() as session:
            session.run(built.train_op)
        with pytest.raises(ClusterError, match='join with parameter servers is for one session, '
                           'and this is the second one'):
            member.session()


def failing(cluster):
    """A build, and an operation that fails in each step."""
    built = halving(cluster)
    [(gradient, _)] = built.gradients
    with tf.control_dependencies([built.train_op]):  # so that no worker leaves the other waiting
        tf.debugging.check_numerics(tf.log(-gradient), 'it is NaN', name='failing')
    return built


def test_a_step_gives_what_it_fetches_and_names_what_fails():
    """As any call of a session does, in the second step of the same fetches, too."""
    def work(session, built, rank):
        [(gradient, _)] = built.gradients
        fails = built.train_op.graph.get_operation_by_name('failing')
        for value in (4., 2.):
            fetched = session.run({'both': [built.train_op, (gradient, {'again': gradient})]})
            assert fetched == {'both': [None, (value, {'again': value})]}
        fed = session.run([gradient, built.train_op], {gradient: 1.})
        assert fed == [1., None]
        with pytest.raises(tf.errors.InvalidArgumentError, match='it is NaN') as raised:
            session.run(fails)
        assert raised.value.op is fails
    in_sessions(make_clusters('ring'), work, failing)


@pytest.mark.parametrize('kind', ['ring', pytest.param('ps', marks=pytest.mark.slow)])
def test_a_step_that_was_run_is_audited_in_a_ring_and_not_on_servers(kind, tmpdir):
    """In a session of a ring, the names of devices begin with the worker's own job and task."""
    cluster_of = make_clusters(kind)

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = halving(cluster)
            assert not towers.audit(built).broken
            options = tf.RunOptions(output_partition_graphs=True,
                                    trace_level=tf.RunOptions.FULL_TRACE)
            metadata = tf.RunMetadata()
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as joined:
                with joined.session() as session:
                    session.run(built.train_op, options=options, run_metadata=metadata)
            report = towers.step_report(built, metadata, str(tmpdir.join('%d.html' % rank)))
            try:
                return str(towers.audit(built, metadata)), report
            except towers.ClusterError as error:
                return str(error), report
    for audited, report in together(work, 2):
        if kind == 'ring':
            assert audited.startswith('audit: every promise kept')
            assert re.search(r'the runtime placed was checked: \d+ operations on /cpu:0$', audited)
            assert set(report.shares) == {'/cpu:0'}
        else:
            assert audited.endswith('names the devices from before: audit it before join.')


@pytest.mark.slow
@pytest.mark.parametrize('config, expected', [
    (tf.ConfigProto(), set()),
    (tf.ConfigProto(graph_options=tf.GraphOptions(build_cost_model=1)), {'cost_graph'})])
def test_a_step_fills_the_metadata_that_it_is_asked_for(config, expected):
    """By its options, or by the config of the session. In any other step both are left out."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = halving(cluster)
            filled = []
            with towers.join(cluster, built, config, start_timeout=30., dead_after=20.) as joined, \
                    joined.session() as session:
                for options in (None, tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)):
                    for _ in range(2):
                        metadata = tf.RunMetadata()
                        session.run(built.train_op, options=options, run_metadata=metadata)
                    filled.append({field.name for field, _ in metadata.ListFields()})
            return filled
    for without, traced in together(work, 2):
        assert without == expected and 'step_stats' in traced


def test_a_callable_makes_one_step_in_each_call():
    """One with feeds calls the session's `run`: worker 1 would wait in the step, and worker 0 for
    worker 1's next step."""
    def work(session, built, rank):
        [(gradient, weight)] = built.gradients

        def train(step_context):
            raw = step_context.session
            if rank == 0:
                for feeds in (None, [], [gradient]):
                    raw.make_callable(built.train_op, feeds)(*[1.] * len(feeds or ()))
            else:
                for feeds in (None, {}, {gradient: 1.}):
                    raw.run(built.train_op, feeds)
            return raw.run(weight)
        return session.run_step_fn(train)
    assert in_sessions(make_clusters('ring'), work) == [1., 1.]


@pytest.mark.parametrize('kind', ['ring', pytest.param('ps', marks=pytest.mark.slow)])
@pytest.mark.slow
def test_sums_without_the_step_are_refused_and_the_training_goes_on(kind):
    def work(session, built, rank):
        [(gradient, w)] = built.gradients
        for weight in (4., 2.):
            session.run(built.train_op)
            if rank == 0:
                with pytest.raises(ClusterError, match='.gradients.* without the step'):
                    session.run({'look': [w, gradient]})
                assert session.run(w) == weight
    in_sessions(make_clusters(kind), work)


@pytest.mark.slow
@pytest.mark.parametrize('kind, ends', [
    ('ring', 'steps'), ('ring', 'the data of all'), ('ps', 'all together')])
def test_one_worker_looks_at_a_weight_alone_while_it_trains_and_afterwards(kind, ends):
    """The gradient is that of the distance to the mean of all, 4: w <- w - 0.2 * (w - 4)."""
    cluster_of, steps = make_clusters(kind), 2 if ends == 'steps' else 3

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            data = tf.data.Dataset.from_tensors(np.array([[1., 3.], [5., 7.]][rank])).repeat(3)
            if ends == 'all together':
                feed = towers.until_all_end(data)
                inputs, cluster = feed.inputs, cluster._replace(active=feed.active)
            else:
                inputs = tf.data.make_one_shot_iterator(data).get_next()
            built = towers.build_towers(
                lambda x: tf.reduce_mean(tf.square(x - tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()))), inputs,
                tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)), 1, 'mean',
                cluster=cluster)
            seen = []
            with towers.join(cluster, built, dead_after=20.) as member, member.session(
                    [StopWithoutSignals(cluster, built)]) as session:
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while not session.should_stop() and (ends != 'steps' or len(seen) < steps):
                        session.run(built.train_op)
                        seen.append(session.run(built.variables[0]) if rank == 0 else None)
                if rank == 0:
                    seen.append(session.run(built.variables[0]))
            return seen
    seen, _ = together(work, 2)
    expected = [4 * (1 - .8 ** step) for step in range(1, steps + 1)]
    # The step that ends the training without data changes nothing, and has a look of its own.
    assert len(seen) - steps in ((1, 2) if ends == 'all together' else (1,))
    np.testing.assert_allclose(seen, expected + expected[-1:] * (len(seen) - steps), rtol=1e-12)


ERRORS = tf.errors


@pytest.mark.parametrize('kind, text, awaited', [
    (ERRORS.InvalidArgumentError, 'assertion failed: [the label 2: expected 0 to 1]', False),
    (ERRORS.InvalidArgumentError, '2 root error(s) found.\n  (0) INVALID_ARGUMENT: the label is 2\n'
     '\t [[{{node Assert}}]]\n  (1) CANCELLED: RecvBuf was cancelled', False),
    (ERRORS.InvalidArgumentError, 'failed while calling RecvBuf of the remote target', True),
    (ERRORS.UnavailableError, 'Socket closed', True), (ERRORS.CancelledError, 'CANCELLED', True)])
def test_only_errors_that_may_be_a_peers_wait_for_its_loss(kind, text, awaited):
    """Others end the worker at once; or an error of all would take 31 seconds."""
    assert member._may_be_of_other_worker(kind(None, None, text)) is awaited


def test_nan_of_a_step_is_an_error_of_its_own():
    with pytest.raises(NonFiniteError,
        match='^the loss of tower 1 is NaN. Nothing of it was saved'):
        raise explained(ERRORS.InvalidArgumentError(
            None, None, 'From /job:worker/replica:0/task:1:\n'
            'towers-nonfinite[the loss of tower 1] : Tensor had NaN values'))


@pytest.mark.slow
def test_a_step_that_fails_by_another_worker_waits_for_its_name():
    """Horovod's error comes at once; the worker that has it would be blamed, and not the other."""
    cluster_of = make_clusters('ring')

    def work(rank):
        with tf.Graph().as_default(), pytest.raises((WorkerLostError, IOError)) as raised:
            cluster = cluster_of(rank)
            with towers.join(cluster, halving(cluster), on_lost=lambda error: None):
                if rank == 0:
                    raise ERRORS.UnknownError(None, None, 'Horovod has been shut down')
                time.sleep(1.)
                raise IOError('no such folder')
        return raised.value
    victim, culprit = together(work, 2)
    assert re.match('worker 1 .* is lost: it has ended: OSError: no such folder', str(victim))
    assert isinstance(victim.__cause__, ERRORS.UnknownError)  # which may have been its own
    assert str(culprit) == 'no such folder'


@pytest.mark.slow
@pytest.mark.parametrize('make', [
    lambda: serve(1)(0), lambda: towers.Cluster('ring', addresses(1))])
def test_a_session_that_is_lost_is_not_made_again(make):
    cluster = make()

    class Lose(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise tf.errors.AbortedError(None, None, 'the server is gone')
    with tf.Graph().as_default(), pytest.raises(
            towers.WorkerLostError, match='TensorFlow lost the session of worker 0 of 1. Start '
            'all again, and the run goes on from the last checkpoint'):
        built = halving(cluster)
        with towers.join(cluster, built, dead_after=.5) as joined, joined.session(
                [Lose()]) as session:
            session.run(built.train_op)


@pytest.mark.slow
def test_the_error_of_a_step_that_costs_the_session_is_said(graph):
    """A `MonitoredSession` takes an `UnavailableError` for the loss of a machine, and hides it."""
    cluster = towers.Cluster('ring', addresses(1))
    built = halving(cluster)

    class Fail(tf.train.SessionRunHook):
        def before_run(self, run_context):
            with connection_of(built).step([0]):
                raise tf.errors.UnavailableError(None, None, 'gs://bucket/train-7: 503')
    with pytest.raises(towers.WorkerLostError, match='the session of worker 0 of 1: '
                       'UnavailableError: gs://bucket/train-7: 503. Start all again'):
        with towers.join(cluster, built, dead_after=.5) as joined, joined.session(
                [Fail()]) as session:
            session.run(built.train_op)


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


@pytest.mark.slow
def test_asynchronous_workers_stop_with_the_chief():
    """It makes 3 steps, two of them when the other has made 5."""
    make, other_trains = serve(2, synchronous=False), threading.Event()

    def work(rank):
        with tf.Graph().as_default():
            cluster = make(rank)
            built = halving(cluster)
            stop, made = StopWithoutSignals(cluster, built), 0
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as joined:
                with joined.session([stop]) as session:
                    while not session.should_stop() and (rank or made < 3):
                        if rank == 0 and made == 1:
                            assert other_trains.wait(30.)
                        session.run(built.train_op)
                        made += 1
                        if rank and made == 5:
                            other_trains.set()
            return stop.is_told, made
    chief, other = together(work, 2)
    assert chief == (True, 3)
    assert other[0] and other[1] >= 5


@pytest.mark.slow
@pytest.mark.parametrize('synchronous', [True, False])
def test_a_chief_that_fails_before_its_session_ends_the_others(synchronous):
    cluster_of, errors = serve(2, synchronous=synchronous), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = halving(cluster)
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
    assert dict(errors)[1].startswith('worker 0 (%s) is lost: ' % cluster_of(0).workers[0])
    assert 'it has ended: OSError: no such folder' in dict(errors)[1]


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']),
    towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], synchronous=False, rank=1)])
def test_where_workers_do_not_wait_for_each_other_each_stops_by_itself(cluster):
    built = halving(cluster)
    hook = towers.StopTogetherHook(cluster, built)
    with pytest.raises(towers.ClusterError, match='is for sessions within towers.join'):
        hook.begin()
    note_connection(built, types.SimpleNamespace(is_over=False, stopped_by=None, steps_made=0))
    hook.begin()
    stopped = []
    context = types.SimpleNamespace(request_stop=lambda: stopped.append(True))
    hook.after_run(context, None)
    assert not stopped
    hook.stop(signal.SIGTERM)
    hook.after_run(context, None)
    assert stopped == [True] and hook.received == signal.SIGTERM
