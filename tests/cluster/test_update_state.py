"""State that the update alone reads: the same on all workers in a step, against numbers by hand."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.graph.variable_writes import Writes
from one_process import addresses, together, train
from sample_models import switched

INPUTS = [np.array([1., 3.]), np.array([10., 6.])]  # of the two workers; their means are 2 and 8
RATE = 2. ** -4


def variable(name, value, trainable=False):
    return tf.get_variable(name, [], tf.float64, tf.constant_initializer(value),
                           trainable=trainable)


def loss_of(inputs):
    """Its gradient is the mean of the inputs."""
    return variable('weight', 1., True) * tf.reduce_mean(inputs)


def write_mean(inputs, state):
    return tf.assign(state, .5 * state + .5 * tf.reduce_mean(inputs))


def falling_rate():
    """The model makes the optimizer's rate smaller by its batch."""
    rate = []

    def optimizer():
        rate.append(variable('state', RATE))
        return tf.train.GradientDescentOptimizer(rate[0])

    def model_fn(inputs):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                             tf.assign(rate[0], rate[0] / tf.reduce_mean(inputs)))
        return loss_of(inputs)
    return model_fn, optimizer, None


def running_mean(how):
    """`transform_gradients` divides by 1 + a running mean, which it reads at some time."""
    made = []

    def model_fn(inputs):
        state = variable('state', 0.)
        made[:] = [state, state.read_value()]
        with tf.control_dependencies([made[1]] if how == 'before' else []):
            made.append(tf.group(write_mean(inputs, state)) if how != 'branch' else tf.group(
                tf.cond(tf.reduce_mean(inputs) > 0., lambda: tf.identity(write_mean(inputs, state)),
                        lambda: tf.constant(0., tf.float64))))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, made[2])
        return loss_of(inputs)

    def transform(pairs):
        state, before, update = made
        if how == 'before':
            value = before
        elif how == 'loop':
            value = tf.while_loop(lambda turn, _: turn < 2,
                                  lambda turn, unused: [turn + 1, state.read_value()],
                                  [0, tf.constant(0., tf.float64)])[1]
        else:
            with tf.control_dependencies([update] if how == 'after' else []):
                value = state.read_value() if how != 'unordered' else state
        return [(gradient / (1. + value), trained) for gradient, trained in pairs]
    return model_fn, lambda: tf.train.GradientDescentOptimizer(RATE), transform


def by_hand(case, use_resource, steps=3):
    """(weight, state) after some steps, by what worker 0 writes. The sums' gradient is 5."""
    weight, state = 1., RATE if case == 'rate' else 0.
    for _ in range(steps):
        before = state
        state = state / 2. if case == 'rate' else .5 * state + .5 * 2.
        # A reference variable has one value, that after the write.
        value = before if case == 'before' and use_resource else state
        weight -= value * 5. if case == 'rate' else RATE * 5. / (1. + value)
    return weight, state


CASES = ['rate', 'unordered', 'after', 'before', 'loop', 'branch']


def of_case(case):
    return falling_rate() if case == 'rate' else running_mean(case)


@pytest.mark.parametrize('case, use_resource', [('rate', True)] + [
    pytest.param(name, name != 'rate', marks=pytest.mark.slow) for name in CASES])
def test_every_worker_updates_by_what_worker_0_has_written(case, use_resource):
    workers = addresses(2)

    def work(rank):
        model_fn, make_optimizer, transform = of_case(case)

        def with_kind(function):
            def call(*given):
                with tf.variable_scope('', use_resource=use_resource):
                    return function(*given)
            return call if function else None
        return train(towers.Cluster('ring', workers, rank=rank), with_kind(model_fn),
                     (INPUTS[rank],), with_kind(make_optimizer), 3,
                     transform_gradients=with_kind(transform))
    # References in loops and branches are of v1; the switch is one for all threads.
    with contextlib.nullcontext() if use_resource else switched('control_flow_v2', False):
        results = together(work, 2)
    weight, state = by_hand(case, use_resource)
    for result in results:
        np.testing.assert_allclose(result['last']['weight'], weight, rtol=1e-12)
        np.testing.assert_allclose(result['last']['state'], state, rtol=1e-12)
    assert results[0]['last']['weight'].tobytes() == results[1]['last']['weight'].tobytes()


@pytest.mark.parametrize('ended, use_resource', [
    (0, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_a_worker_without_data_goes_on_updating_by_the_same_state(ended, use_resource):
    """One worker has data for a step, the other for three; the read waits for the model's write,
    which a worker without data does not run."""
    workers = addresses(2)

    def work(rank):
        model_fn, make_optimizer, transform = running_mean('after')
        with tf.Graph().as_default(), tf.variable_scope('', use_resource=use_resource):
            feed = towers.until_all_end(tf.data.Dataset.from_tensors(INPUTS[rank]).repeat(
                1 if rank == ended else 3))
            cluster = towers.Cluster('ring', workers, rank=rank, active=feed.active)
            step = towers.build_towers(
                model_fn, feed.inputs, make_optimizer(), 1, 'mean',
                global_step=tf.train.get_or_create_global_step(), cluster=cluster,
                transform_gradients=transform)
            variables = {each.op.name: each for each in tf.global_variables()}
            with towers.join(cluster, step, start_timeout=30., dead_after=20.) as member, \
                    member.session() as session:
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        session.run(step.train_op)
                        last = session.run_step_fn(
                            lambda step_context: step_context.session.run(variables))
            return last
    results = together(work, 2)
    weight, state = 1., 0.
    for turn in range(3):
        if turn == 0 or ended:
            state = .5 * state + .5 * 2.
        weight -= RATE * (5. if turn == 0 else INPUTS[1 - ended].mean()) / (1. + state)
    for result in results:
        np.testing.assert_allclose(result['state'], state, rtol=1e-12)
        np.testing.assert_allclose(result['weight'], weight, rtol=1e-12)


def built(model_fn=loss_of, optimizer=None, rank=0, examples=4, **options):
    fields = {name: options.pop(name) for name in ('uneven',) if name in options}
    cluster = towers.Cluster('ring', ['a:1', 'b:1'], rank=rank, **fields)
    return towers.build_towers(
        model_fn, (tf.ones([examples], tf.float64),),
        optimizer or tf.train.GradientDescentOptimizer(.1), 2, remainder='weight',
        global_step=tf.train.get_or_create_global_step(), cluster=cluster, **options)


def falling(optimizer):
    """Of a rate that falls with the steps, and of one that is fed."""
    step = tf.train.get_or_create_global_step()
    fed = tf.placeholder_with_default(tf.constant(.1), [])
    return optimizer(tf.train.exponential_decay(fed, step, 10, .5))


@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('options', [{}, dict(uneven=True)])
def test_what_the_sums_alone_write_is_not_sent(options, use_resource):
    """Slots, powers of beta, and the step that a rate falls with."""
    def transform(pairs):
        noise = tf.random.stateless_normal(
            [], tf.stack([tf.constant(1, tf.int64), tf.train.get_global_step()]))
        return [(gradient + tf.cast(noise, tf.float64), trained) for gradient, trained in pairs]
    with tf.variable_scope('', use_resource=use_resource):
        step = built(optimizer=falling(tf.train.AdamOptimizer), transform_gradients=transform,
                     **options)
    assert step.machines.state == []


@pytest.mark.parametrize('reads', [False, True], ids=['from_the_batch', 'and_its_own_value'])
def test_a_look_at_the_variable_between_two_steps_writes_nothing(reads):
    """TensorFlow's own read of a reference variable waited for the write, and so a summary of the
    rate, and Horovod's start of a session, made an update and took a batch."""
    with tf.variable_scope('', use_resource=False):
        rate = variable('state', RATE)

        def model_fn(inputs):
            value = tf.reduce_mean(inputs) * (rate.read_value() if reads else 1.)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(rate, value))
            return loss_of(inputs)
        built = towers.build_towers(
            model_fn, tf.constant(INPUTS[0]), tf.train.GradientDescentOptimizer(rate), 1, 'mean',
            cluster=towers.Cluster('ring', ['a:1', 'b:1']))
    look = tf.summary.scalar('rate', rate)
    writes = [op for op in step_operations([built.train_op]) if 'state' in Writes(
        rate.graph).of(op)]
    assert writes and not {op.name for op in step_operations([look])} & {op.name for op in writes}
    assert not rate.value().op.control_inputs
    # The update has a read of its own, after the message.
    apply, = [op for op in step_operations([built.train_op])
              if op.type in ('ApplyGradientDescent', 'ResourceApplyGradientDescent')]
    of_update = step_operations([apply.inputs[1]])
    assert apply.inputs[1].op is not rate.value().op
    assert any('Collective' in op.type for op in of_update)


@pytest.mark.slow
@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_the_program_computed_from_the_variable_may_be_looked_at(use_resource):
    """One worker looks alone at the rate that it gave the optimizer, between the steps."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default(), tf.variable_scope('', use_resource=use_resource):
            state = variable('state', RATE)
            rate = tf.maximum(state * 2., 0.) / 2.

            def model_fn(inputs):
                tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                                     tf.assign(state, state / tf.reduce_mean(inputs)))
                return loss_of(inputs)
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = towers.build_towers(
                model_fn, tf.constant(INPUTS[rank]), tf.train.GradientDescentOptimizer(rate), 1,
                'mean', global_step=tf.train.get_or_create_global_step(), cluster=cluster)
            seen = []
            with towers.join(cluster, built, start_timeout=30., dead_after=10.) as member, \
                    member.session() as session:
                for _ in range(3):
                    session.run(built.train_op)
                    if rank == 0:
                        seen.append(session.run([rate, state, built.variables[0]]))
            return seen
    seen, _ = together(work, 2)
    weight, value = 1., RATE
    for looked_at in seen:
        value /= 2.  # the mean of worker 0's inputs; the update reads it after that
        weight -= value * 5.
        np.testing.assert_allclose(looked_at, [value, value, weight], rtol=1e-12)


@pytest.mark.parametrize('uneven', [False, True])
def test_what_the_model_counts_is_sent(uneven):
    def model_fn(inputs):
        seen = variable('seen', 0.)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(seen, 1.))
        return loss_of(inputs) * seen
    assert [each.op.name for each in built(model_fn, uneven=uneven).machines.state] == ['seen']


def test_workers_that_share_other_state_are_told_apart():
    """One worker would wait for ever for what the other does not send."""
    found = []
    for case in ('unordered', 'sums'):
        with tf.Graph().as_default():
            model_fn, optimizer, transform = running_mean('unordered')
            found.append(fingerprint(towers.Cluster('ring', ['a:1', 'b:1']), built(
                model_fn, optimizer(), transform_gradients=transform if case != 'sums' else None),
                4))
    assert difference(found[0], found[1]) == (
        'its state that training reads is empty, and that of worker 0 state')


def test_a_read_between_two_writes_is_refused():
    """Each worker would read what it has written itself."""
    with tf.variable_scope('', use_resource=True):
        state = variable('state', RATE)
    first = tf.assign_add(state, 1.)
    with tf.control_dependencies([first]):
        rate = state.read_value()

    def model_fn(inputs):
        for write in (first, tf.assign(state, 2. * rate)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)
        return loss_of(inputs)
    with pytest.raises(ClusterError, match="'state' is written by the model of each worker and "
                                           'read by'):
        built(model_fn, tf.train.GradientDescentOptimizer(rate))
