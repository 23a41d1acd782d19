"""State that training reads or writes beside the sums: worker 0's on all workers, against one
machine by hand; what is sent for it, and what is refused."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError, SharedVariableError
from one_process import addresses, serve, together, train

INPUTS = [np.array([1., 3.]), np.array([10., 6.])]  # of the two workers; their means are 2 and 8
RATE = 2. ** -4
slow = pytest.mark.slow


def variable(name, value=0., trainable=False, shape=(), use_resource=True):
    with tf.variable_scope('', use_resource=use_resource, reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value),
                               trainable=trainable)


def loss_of(inputs):
    """Its gradient is the mean of the inputs."""
    return variable('weight', 1., True) * tf.reduce_mean(inputs)


def update_op(write):
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)


def in_a_ring(of_rank, steps=3):
    """What both workers have after some steps; of_rank(rank) is (model, optimizer, transform)."""
    workers = addresses(2)

    def work(rank):
        model_fn, make_optimizer, transform = of_rank(rank)
        return train(towers.Cluster('ring', workers, rank=rank), model_fn, (INPUTS[rank],),
                     lambda: towers.Objective(make_optimizer(), transform_gradients=transform),
                     steps)
    return together(work, 2)


# ---- state that the update reads ----------------------------------------------------------------


def rate_by_the_batch(use_resource=True):
    """The model changes the optimizer's rate by its batch; the rate is made before."""
    def optimizer():
        return tf.train.GradientDescentOptimizer(variable('state', RATE,
                                                          use_resource=use_resource))

    def model_fn(inputs):
        rate = variable('state', RATE, use_resource=use_resource)
        update_op(tf.assign(rate, .5 * rate + RATE * tf.reduce_mean(inputs)))
        return loss_of(inputs)
    return model_fn, optimizer, None


def running_mean():
    """`transform_gradients` divides by 1 + a running mean, which it reads after the write."""
    made = []

    def model_fn(inputs):
        state = variable('state')
        made[:] = [state, tf.group(tf.assign(state, .5 * state + .5 * tf.reduce_mean(inputs)))]
        update_op(made[1])
        return loss_of(inputs)

    def transform(pairs):
        state, update = made
        with tf.control_dependencies([update]):
            value = state.read_value()
        return [(gradient / (1. + value), trained) for gradient, trained in pairs]
    return model_fn, lambda: tf.train.GradientDescentOptimizer(RATE), transform


@slow
@pytest.mark.parametrize('case', ['rate', 'after'])
def test_every_worker_updates_by_what_worker_0_has_written(case):
    of_rate = case == 'rate'
    results = in_a_ring(lambda rank: rate_by_the_batch() if of_rate else running_mean())
    weight, state = 1., RATE if of_rate else 0.  # the sums' gradient is 5
    for _ in range(3):
        state = .5 * state + (RATE if of_rate else .5) * 2.
        weight -= 5. * (state if of_rate else RATE / (1. + state))
    for result in results:
        np.testing.assert_allclose(result['last']['weight'], weight, rtol=1e-12)
        np.testing.assert_allclose(result['last']['state'], state, rtol=1e-12)
    assert results[0]['last']['weight'].tobytes() == results[1]['last']['weight'].tobytes()


@pytest.mark.slow
def test_a_worker_without_data_goes_on_updating_by_the_same_state():
    """Worker 0 has data for a step, the other for three; the read waits for the model's write,
    which a worker without data does not run."""
    workers = addresses(2)

    def work(rank):
        model_fn, make_optimizer, transform = running_mean()
        with tf.Graph().as_default():
            feed = towers.until_all_end(tf.data.Dataset.from_tensors(INPUTS[rank]).repeat(
                3 if rank else 1))
            cluster = towers.Cluster('ring', workers, rank=rank, active=feed.active)
            step = towers.build_towers(model_fn,
                                       feed.inputs,
                                       towers.Objective(make_optimizer(),
                                                        transform_gradients=transform),
                                       1,
                                       'mean',
                                       cluster=cluster)
            fetched = {each.op.name: each for each in tf.global_variables()}
            with towers.join(cluster, step, start_timeout=30., dead_after=20.) as member, \
                    member.session() as session:
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        session.run(step.train_op)
                        last = session.run_step_fn(
                            lambda step_context: step_context.session.run(fetched))
            return last
    # The state is 1 after the first step, and stays; the gradient is 5, and then 8 twice.
    for result in together(work, 2):
        np.testing.assert_allclose(result['state'], 1., rtol=1e-12)
        np.testing.assert_allclose(result['weight'], 1. - RATE * (5. + 8. + 8.) / 2., rtol=1e-12)


# ---- state that the forward pass reads, trained variables, slots --------------------------------


def center_of_examples(inputs, inline=False):
    """A model of a trained center, which it draws to the mean of the examples, too."""
    center = variable('center', 0., True)
    loss = tf.reduce_mean(tf.square(inputs - center))
    with tf.control_dependencies([loss]):
        written = tf.assign_sub(center, .5 * (center - tf.reduce_mean(inputs)))
    if inline:
        with tf.control_dependencies([written]):
            return tf.reduce_mean(tf.square(inputs * center.read_value()))
    update_op(written)
    return loss


@slow
def test_the_models_write_of_worker_0_comes_before_the_update_of_all():
    results = in_a_ring(lambda rank: (
        center_of_examples, lambda: tf.train.GradientDescentOptimizer(.125), None))
    center = 0.
    for _ in range(3):
        center += .5 * (INPUTS[0].mean() - center) + .125 * 2. * (np.mean(INPUTS) - center)
    for result in results:
        np.testing.assert_allclose(result['last']['center'], center, rtol=1e-12)


@slow
def test_a_forward_pass_reads_what_worker_0_wrote_in_the_step_before():
    """Centers of examples, not trained: written within the loss, of a batch of any size."""
    def model_fn(inputs):
        center, used = variable('center'), variable('weight', 1., True)
        difference = center - tf.reduce_mean(inputs)
        loss = tf.reduce_mean(inputs) * used * tf.identity(center)
        with tf.control_dependencies([loss]):
            written = tf.assign_sub(center, .5 * difference)
        with tf.control_dependencies([written]):
            return tf.identity(loss)
    results = in_a_ring(lambda rank: (
        model_fn, lambda: tf.train.GradientDescentOptimizer(RATE), None))
    center, weight = 0., 1.
    for _ in range(3):
        weight -= RATE * 5. * center
        center -= .5 * (center - 2.)
    for result in results:
        np.testing.assert_allclose(result['last']['center'], center, rtol=1e-12)
        np.testing.assert_allclose(result['last']['weight'], weight, rtol=1e-12)


def embeddings(ids):
    """Dense and sparse variables of two types; one table looked up twice."""
    total = 0.
    for index, dtype in enumerate([tf.float64, tf.float32]):
        table = tf.get_variable('table_%d' % index, [9, 2], dtype, tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, tf.cast(ids, tf.int32))
        if index:
            each, places = tf.unique(tf.cast(ids, tf.int32))
            rows += tf.gather(tf.gather(table, each), places)
        total += tf.cast(tf.reduce_sum(tf.square(rows), 1), tf.float64)
    return tf.reduce_mean(tf.square(total - variable('bias', 0., True)))


@slow
@pytest.mark.parametrize('ids, uneven', [
    ([[0., 1., 1.], [1., 5.]], True),
    ([[0., 1., 1.], [1., 5., 8.]], False)])  # static numbers of rows of the first table
def test_embeddings_and_their_slots_are_those_of_one_device_and_equal_bit_for_bit(ids, uneven):
    """The workers have rows of their own, one in common, and one more often than the other."""
    workers = addresses(2)
    one, other = [each['last'] for each in together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=uneven), embeddings,
        (np.array(ids[rank]),), lambda: tf.train.MomentumOptimizer(2. ** -9, .5), 4), 2)]
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.train.MomentumOptimizer(2. ** -9, .5).minimize(
            embeddings(tf.constant(ids[0] + ids[1], tf.float64)))
        session.run(tf.global_variables_initializer())
        for _ in range(4):
            session.run(step)
        for variable in tf.global_variables():
            np.testing.assert_allclose(one[variable.op.name], session.run(variable), rtol=1e-5,
                                       err_msg=variable.op.name)


@slow
def test_on_parameter_servers_the_chief_alone_writes_in_the_forward_pass():
    def model_fn(inputs):
        mean = variable('mean')
        with tf.control_dependencies([tf.assign(mean, .5 * mean + .5 * tf.reduce_mean(inputs))]):
            return loss_of(inputs)
    cluster_of = serve(2)
    results = together(lambda rank: train(
        cluster_of(rank), model_fn,
        ([np.arange(4.), 100. + np.arange(4.)][rank],),
        lambda: tf.train.GradientDescentOptimizer(2. ** -20), 3, 2), 2)
    # The mean of the first tower's 0 and 1: half, three quarters and 7/8 of it.
    assert results[0]['last']['mean'] == .5 * 7 / 8


# ---- what is sent -------------------------------------------------------------------------------


def build(model_fn, optimizer=None, **options):
    cluster = towers.Cluster('ring', ['a:1', 'b:1'])
    return towers.build_towers(
        model_fn, (tf.constant(INPUTS[0]),),
        optimizer or tf.train.GradientDescentOptimizer(.125), 2, 'mean', remainder='weight',
        global_step=tf.train.get_or_create_global_step(), cluster=cluster, **options)


def writing(name, new_value, trainable=False):
    def model_fn(inputs):
        update_op(tf.assign(variable(name, RATE, trainable), new_value(variable(name))))
        return loss_of(inputs) * variable(name)
    return model_fn


def by_python(value):
    found = tf.py_func(lambda step: np.float64(.5), [tf.train.get_global_step()], tf.float64)
    found.set_shape([])
    return found


def with_batch_norm(inputs):
    towers.mend_slim()
    import tf_slim as slim
    net = slim.batch_norm(inputs[:, None] * variable('weight', 1., True), fused=False)
    return tf.reduce_mean(tf.nn.dropout(net, rate=.5)) * tf.cast(
        tf.train.get_global_step(), tf.float64)


@pytest.mark.parametrize('model_fn, expected', [
    (writing('rate', by_python), ['rate']),
    (writing('center', lambda value: tf.clip_by_value(value, -1., 1.), True), ['center']),
    pytest.param(with_batch_norm, [], marks=slow)])
def test_what_worker_0_sends_in_each_step(model_fn, expected):
    tf.train.get_or_create_global_step()
    step = build(model_fn)
    assert [each.op.name for each in step.machines.state] == expected


# ---- what is refused ----------------------------------------------------------------------------


UNKNOWN = "'state' is written by the model of each worker and read by .* at a time that cannot be"


def rate_of_a_reference_variable():
    """Its value is read when it is made: a look at it would wait for the other workers."""
    model_fn, optimizer, _ = rate_by_the_batch(use_resource=False)
    return model_fn, optimizer()


def rate_that_the_model_has_read():
    """Before its write, as one machine would; the value may be this worker's."""
    state = variable('state', RATE)
    rate = state.read_value()

    def model_fn(inputs):
        update_op(tf.assign(state, .5 * rate + RATE * tf.reduce_mean(inputs)))
        return loss_of(inputs)
    return model_fn, tf.train.GradientDescentOptimizer(rate)


def rate_before_the_build():
    model_fn, _, _ = rate_by_the_batch()
    return model_fn, tf.train.GradientDescentOptimizer(variable('state', RATE) * 2.)


@pytest.mark.parametrize('case', [
    rate_of_a_reference_variable, rate_that_the_model_has_read,
    pytest.param(rate_before_the_build, marks=slow)])
def test_an_update_that_may_take_a_value_of_this_worker_is_refused(case):
    with pytest.raises(ClusterError, match=UNKNOWN):
        build(*case())


def test_a_forward_pass_that_writes_a_trained_variable_is_refused():
    with pytest.raises(ClusterError, match=(
            "forward pass writes the trained variable 'center' .* UPDATE_OPS")):
        build(lambda inputs: center_of_examples(inputs, inline=True))


def test_replicas_of_a_variable_that_the_model_writes_are_refused():
    with pytest.raises(ClusterError, match=(
            "'replicated'.* the model writes the trained variable 'center'")):
        build(center_of_examples, variables=towers.VariablePlacement('replicated'))


def test_on_parameter_servers_what_the_forward_pass_writes_and_reads_is_refused():
    def model_fn(inputs):
        count = variable('count')
        with tf.control_dependencies([tf.assign_add(count, 1.)]):
            return loss_of(inputs) * count.read_value()
    with pytest.raises(SharedVariableError, match='writes variable count .* UPDATE_OPS'):
        towers.build_towers(
            model_fn, (tf.ones([4], tf.float64),), tf.train.GradientDescentOptimizer(.1), 1,
            cluster=towers.Cluster('ps', ['a:1', 'a:2'], ['b:1'], rank=1))
