"""A finished model beside each mode of a build, against one device."""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from finished_programs import check_equal, dense, mean_square, placeholders
from one_process import addresses, in_sessions
from sample_models import momentum, sgd, switched

slow = pytest.mark.slow
X, Y = samples.vectors(7)


def layers(x, y):
    h = x
    for number in range(4):
        h = tf.tanh(dense(h, 6, 'layer_%d' % number))
    return mean_square(dense(h, 3, 'last'), y)


PAIRS = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]

MODES = {
    'shares': dict(shares=[3, 1]),
    'stages': dict(num_towers=PAIRS, pipeline=towers.Pipeline(stages='auto')),
    'micro-batches in stages': dict(num_towers=PAIRS, pipeline=towers.Pipeline(2, stages='auto')),
    'balanced': dict(variables=towers.VariablePlacement('balanced')),
    'XLA': dict(numerics=towers.Numerics(xla=True)),
    'recompute by itself': dict(memory=towers.Memory(recompute='auto')),
    'both': dict(memory=towers.Memory(accumulate=2, recompute='auto'))}


@pytest.mark.slow
@pytest.mark.parametrize('mode', [
    mode if mode in ('shares', 'balanced') else pytest.param(mode, marks=slow) for mode in MODES])
def test_numbers_are_those_of_one_device(mode):
    options = dict(dict(num_towers=2, remainder='weight'), **MODES[mode])
    with switched('control_flow_v2', False):
        check_equal(layers, (X, Y), **options)


@slow
@pytest.mark.parametrize('size', [2, 3, 7])
def test_batches_of_any_size(size):
    """Fewer examples than towers among them: a tower without one has no part in the mean."""
    check_equal(layers, (X[:size], Y[:size]), 3, remainder='weight')


@pytest.mark.slow
def test_a_remainder_is_dropped():
    x, y = placeholders((X, Y))
    loss = layers(x, y)
    built = towers.build_towers(loss, (x, y), sgd(), 3, 'mean', remainder='drop')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        ours = session.run(built.loss, {x: X, y: Y})
        theirs = session.run(loss, {x: X[:6], y: Y[:6]})
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.slow
def test_an_evaluation_build():
    """The same tensors, without an optimizer, on other devices than those of training."""
    x, y = placeholders((X, Y))
    logits = dense(x, 3, 'a')
    loss = mean_square(logits, y)
    trained = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')
    built = towers.build_towers(
        towers.ModelOutput(loss, logits, {'size': tf.reduce_mean(tf.abs(logits))}), (x, y), None,
        3, remainder='weight', reuse=trained)
    assert built.train_op is None
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        session.run(trained.train_op, {x: X, y: Y})
        ours, theirs = session.run(
            [[built.loss, built.predictions, built.metrics['size']],
             [loss, logits, tf.reduce_mean(tf.abs(logits))]], {x: X, y: Y})
    for mine, expected in zip(ours, theirs):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


@slow
def test_moving_averages_of_the_weights():
    """`ExponentialMovingAverage` after the train op, and a `Scaffold` with its saver."""
    results = []
    for on_towers in (True, False):
        with tf.Graph().as_default():
            x, y = placeholders((X, Y))
            loss = layers(x, y)
            step = tf.train.get_or_create_global_step()
            if on_towers:
                train_op = towers.build_towers(loss, (x, y), momentum(), 3, 'mean', global_step=step,
                                               remainder='weight').train_op
            else:
                train_op = momentum().minimize(loss, global_step=step)
            averages = tf.train.ExponentialMovingAverage(.5, step)
            with tf.control_dependencies([train_op]):
                train_op = averages.apply(tf.trainable_variables())
            saver = tf.train.Saver(averages.variables_to_restore())
            tf.set_random_seed(1)
            scaffold = tf.train.Scaffold(saver=saver)
            variables = {each.op.name: each for each in tf.global_variables()}
            with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(
                    scaffold, config=towers.session_config(4))) as session:
                def set_all(step_context):
                    for variable in tf.trainable_variables():
                        size = variable.shape.num_elements()
                        variable.load(np.arange(1., size + 1).reshape(variable.shape) / 30,
                                      step_context.session)
                    step_context.session.run(
                        [averages.average(each).initializer for each in tf.trainable_variables()])
                session.run_step_fn(set_all)
                for _ in range(3):
                    session.run(train_op, {x: X, y: Y})
                results.append(session.run(variables))
    ours, theirs = results
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-11, err_msg=name)


@pytest.mark.slow
def test_summaries_are_the_programs_own():
    """A build adds none; those of the batch's values are taken of `built.of`."""
    x, y = placeholders((X, Y))
    loss = layers(x, y)
    tf.summary.scalar('loss', loss)
    before = tf.get_collection(tf.GraphKeys.SUMMARIES)
    built = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')
    assert tf.get_collection(tf.GraphKeys.SUMMARIES) == before
    of_batch = tf.summary.scalar('loss_of_towers', built.of(loss))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        texts = session.run([tf.summary.merge(before), of_batch], {x: X, y: Y})
    values = [tf.Summary.FromString(text).value[0] for text in texts]
    assert [value.tag for value in values] == ['loss', 'loss_of_towers']
    np.testing.assert_allclose(values[1].simple_value, values[0].simple_value, rtol=1e-6)


@pytest.mark.parametrize('keras', [False, True], ids=['tf.nn.dropout', 'stateless seeds'])
def test_each_tower_draws_its_own_numbers(keras):
    """Tower 0 those of the program, by its seed."""
    x = tf.placeholder(tf.float64, [None, 50])
    noise = tf.random_uniform(tf.shape(x), dtype=tf.float64, seed=3)
    loss = tf.reduce_mean(x * noise) * tf.get_variable('w', [], tf.float64)
    step = tf.train.get_or_create_global_step() if keras else None
    built = towers.build_towers(
        towers.ModelOutput(loss, predictions=noise * 1.), x, sgd(), 2, 'mean', global_step=step,
        numerics=towers.Numerics(stateless_random=keras))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        rows = session.run(built.predictions, {x: np.ones([4, 50])})
        again = session.run(built.predictions, {x: np.ones([4, 50])})
    assert not np.isclose(rows[:2], rows[2:]).any()
    assert np.array_equal(rows, again) == keras
    if not keras:
        with tf.Session(config=towers.session_config(2)) as session:
            program = session.run(noise, {x: np.ones([2, 50])})
        np.testing.assert_array_equal(rows[:2], program)


@pytest.mark.slow
def test_builds_for_each_of_two_losses_of_one_model():
    """As a GAN has them that minimizes each loss on its own inputs."""
    def discriminate(x):
        with tf.variable_scope('d', reuse=tf.AUTO_REUSE):
            return dense(tf.tanh(dense(x, 4, 'a')), 1, 'b')
    results = []
    for on_towers in (True, False):
        with tf.Graph().as_default():
            real, noise = placeholders((X, Y))
            with tf.variable_scope('g'):
                fake = dense(noise, 6, 'c')
            on_fake = discriminate(fake)
            losses = [tf.reduce_mean(tf.nn.softplus(on_fake) + tf.nn.softplus(-discriminate(real))),
                      tf.reduce_mean(tf.nn.softplus(-on_fake))]
            variables = [[each for each in tf.trainable_variables() if each.op.name[0] == letter]
                         for letter in 'dg']
            if on_towers:
                steps = [towers.build_towers(
                    loss, inputs, towers.Objective(momentum(), var_list=some), 3, 'mean',
                    remainder='weight').train_op
                    for loss, inputs, some in zip(losses, ((real, noise), noise), variables)]
            else:
                steps = [momentum().minimize(loss, var_list=some)
                         for loss, some in zip(losses, variables)]
            feeds = {real: X, noise: Y}, {noise: Y}
            with tf.Session(config=towers.session_config(3)) as session:
                session.run(tf.global_variables_initializer())
                for variable in tf.trainable_variables():
                    size = variable.shape.num_elements()
                    variable.load(np.arange(1., size + 1).reshape(variable.shape) / 10, session)
                for _ in range(3):
                    for train_op, feed in zip(steps, feeds):
                        session.run(train_op, feed)
                results.append(session.run({each.op.name: each for each in tf.global_variables()}))
    ours, theirs = results
    assert sorted(ours) == sorted(theirs)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-11, err_msg=name)


@slow
def test_two_workers_of_a_ring_with_two_towers_each():
    """The weight halves in each step: its gradient is w times the mean of all examples, 1/2."""
    workers = addresses(2)

    def build(cluster):
        x = tf.placeholder_with_default(
            tf.constant([.15, .35], tf.float64) + .5 * cluster.rank, [None])
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.))
        loss = tf.reduce_mean(x) * tf.square(w) / 2.
        return towers.build_towers(loss, x, sgd(1.), 2, 'mean', cluster=cluster)

    def work(session, built, rank):
        for _ in range(2):
            session.run(built.train_op)
        return session.run(built.variables[0])
    weights = in_sessions(lambda rank: towers.Cluster('ring', workers, rank=rank), work, build)
    np.testing.assert_allclose(weights, 2., rtol=1e-12)


# ---- cost ----------------------------------------------------------------------------------------

def nodes_of_a_step(build):
    """The names of the nodes that a step runs, without those of transfers: a list."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        x, y = placeholders((X, Y))
        built = build(x, y)
        options = tf.RunOptions(output_partition_graphs=True)
        metadata = tf.RunMetadata()
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(built.train_op, {x: X, y: Y}, options, metadata)
        return [node for graph in metadata.partition_graphs for node in graph.node
                if node.op not in ('_Send', '_Recv')]


def computing(nodes):
    """How many nodes of each type compute something."""
    kinds = [node.op for node in nodes
             if node.op not in ('Const', 'NoOp', 'Identity', 'HostConst')]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


@pytest.mark.slow
def test_a_step_runs_what_that_of_a_function_runs():
    """The program's own model is in the graph, and no step computes it."""
    with switched('resource_variables', True):  # as a build makes those of a function
        of_program = nodes_of_a_step(lambda x, y: towers.build_towers(
            layers(x, y), (x, y), momentum(), 2, 'mean', remainder='weight'))
        of_function = nodes_of_a_step(lambda x, y: towers.build_towers(
            layers, (x, y), momentum(), 2, 'mean', remainder='weight'))
    assert computing(of_program) == computing(of_function)
    own = [node.name for node in of_program
           if re.match(r'(MatMul|Tanh|Square|Mean|sub)(_\d+)?$', node.name)]
    assert not own


@pytest.mark.slow
def test_a_build_imports_the_model_once_more():
    """Beside one import for each further tower, as of a function."""
    x, y = placeholders((X, Y))
    loss = layers(x, y)
    towers.build_towers(loss, (x, y), sgd(), 3, 'mean', remainder='weight')
    forward = [op.name for op in tf.get_default_graph().get_operations() if op.type == 'Tanh']
    assert len(forward) == 4 * (1 + 3)
    assert sum(name.startswith('tower_') for name in forward) == 4 * 3
