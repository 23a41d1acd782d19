"""Several losses, each with its own optimizer, against the same in plain TF1 on one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph.graph_walk import step_operations
from case_marks import first_fast

BATCH = np.random.RandomState(0).rand(8, 3)
slow = pytest.mark.slow


def variable(name, shape, value):
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value))


def gan(x):
    """A GAN with a gradient penalty, which is a second derivative."""
    with tf.variable_scope('g'):
        fake = tf.tanh(tf.matmul(tf.reduce_mean(x, 1, keepdims=True), variable('w', [1, 3], .5)))

    def judge(images):
        with tf.variable_scope('d', reuse=tf.AUTO_REUSE):
            return tf.matmul(tf.tanh(tf.matmul(images, variable('u', [3, 2], .3))),
                             variable('v', [2, 1], -.7))
    mixed = .25 * x + .75 * fake
    slope, = tf.gradients(judge(mixed), mixed)
    penalty = tf.reduce_mean(tf.square(tf.sqrt(tf.reduce_sum(tf.square(slope), 1)) - 1))
    return {'loss': {
        'discriminator': (tf.reduce_mean(judge(fake)) - tf.reduce_mean(judge(x)) + 10 * penalty),
        'generator': -tf.reduce_mean(judge(fake))}, 'predictions': fake}


def starting_with(prefix):
    return lambda variables: [each for each in variables if each.op.name.startswith(prefix)]


OF_GAN = {'discriminator': starting_with('d/'), 'generator': starting_with('g/')}


def optimizers(names=('discriminator', 'generator'), var_lists=None, **options):
    """Optimizers by name; with lists of variables or other options they are `Objective`s."""
    chosen = dict(zip(names, (tf.train.AdamOptimizer(.1), tf.train.MomentumOptimizer(.2, .9))))
    for name in () if var_lists is None else names:
        chosen[name] = towers.Objective(chosen[name], var_lists.get(name), options.get(name))
    return chosen


def values(session):
    variables = tf.global_variables()
    return dict(zip([each.op.name for each in variables], session.run(variables)))


def by_hand(model_fn, var_lists, turns):
    """Plain TF1: the losses are minimized in these turns; `'all'`: both, of the weights before."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        losses = model_fn(tf.constant(BATCH))['loss']
        chosen = optimizers(list(losses))
        pairs = {name: [pair for pair in chosen[name].compute_gradients(
            losses[name], var_lists.get(name, lambda all_: all_)(tf.trainable_variables()))
                        if pair[0] is not None] for name in losses}
        apply = {name: chosen[name].apply_gradients(pairs[name], step) for name in losses}
        fed = {name: [tf.placeholder(tf.float64) for _ in pairs[name]] for name in losses}
        apply_fed = [chosen[name].apply_gradients(list(zip(fed[name], [v for _, v in pairs[name]])))
                     for name in losses]
        count = tf.assign_add(step, 1)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for turn in turns:
                if turn != 'all':
                    session.run(apply[turn])
                    continue
                gradients = session.run({name: [g for g, _ in pairs[name]] for name in losses})
                feed = {tensor: value for name in losses
                        for tensor, value in zip(fed[name], gradients[name])}
                for each in apply_fed:
                    session.run(each, feed)
                session.run(count)
            return values(session)


def by_towers(model_fn, var_lists, turns, devices, **options):
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(model_fn, tf.constant(BATCH), optimizers(
            list(options.pop('names', ('discriminator', 'generator'))), var_lists), devices,
                                    'mean', global_step=step, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            for turn in turns:
                session.run(built.train_op if turn == 'all' else built.train_ops[turn])
            return values(session)


def assert_same(one, other):
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-12, err_msg=name)


TURNS = ['discriminator', 'all', 'generator', 'all']


@pytest.mark.parametrize('options', [dict(devices=2)] + [
    pytest.param(dict(devices=2, variables=towers.VariablePlacement('replicated')), marks=slow)],
                         ids=lambda options: '-'.join(map(str, options.values())))
def test_a_gan_is_trained_as_by_hand(options):
    one = by_hand(gan, OF_GAN, TURNS)
    assert one['global_step'] == len(TURNS)
    assert_same(one, by_towers(gan, OF_GAN, TURNS, **options))


def two_heads(x):
    trunk = tf.tanh(tf.matmul(x, variable('trunk', [3, 2], .4)))
    main, auxiliary = variable('a', [2, 1], .5), variable('b', [2, 1], -.5)
    return {'loss': {'main': tf.reduce_mean(tf.square(tf.matmul(trunk, main) - 1)),
                     'aux': tf.reduce_mean(tf.square(tf.matmul(trunk, auxiliary)))}}


@pytest.mark.slow
def test_a_train_op_computes_what_its_loss_needs():
    with tf.Graph().as_default():
        built = towers.build_towers(two_heads, tf.constant(BATCH), optimizers(('main', 'aux')), 2)
        ran = {name: {op.name for op in step_operations([op])}
               for name, op in built.train_ops.items()}
        for tower in built.towers:
            assert tower.loss['main'].op.name in ran['main'] - ran['aux']
            assert tower.loss['aux'].op.name in ran['aux'] - ran['main']
        of_all = {op.name for op in step_operations([built.train_op])}
        assert {tower.loss[name].op.name for tower in built.towers
                for name in ('main', 'aux')} <= of_all


def normed(x):
    """One layer below both losses, one of each, one that no loss uses."""
    def average(values, name):
        mean = tf.get_variable(name, [], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, tf.reduce_mean(values)).op)
        return values * variable('scale_' + name, [], 1.)
    below = average(x + 1, 'below')
    average(x + 5, 'of_none')
    return {'loss': {'one': tf.reduce_mean(average(below + 1, 'of_one')),
                     'two': tf.reduce_mean(average(below + 2, 'of_two'))}}


@pytest.mark.slow
def test_updates_ride_on_the_train_ops_that_compute_their_layer():
    with tf.Graph().as_default():
        built = towers.build_towers(normed, tf.constant(BATCH), optimizers(('one', 'two')), 2)
        means = {each.op.name: each for each in tf.global_variables() if '_' not in each.op.name
                 or each.op.name.startswith('of_')}
        means = {name: means[name] for name in ('below', 'of_one', 'of_two', 'of_none')}

        def changed(op):
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run(tf.global_variables_initializer())
                session.run(op)
                return {name for name, value in session.run(means).items() if value != 0}
        # That of no loss needs nothing but the batch, which every train op has.
        assert changed(built.train_ops['one']) == {'below', 'of_one', 'of_none'}
        assert changed(built.train_ops['two']) == {'below', 'of_two', 'of_none'}
        assert changed(built.train_op) == set(means)
        assert 'one: AdamOptimizer, 2 variables, 3 of the updates' in ' '.join(
            str(built.plan).split())


def pulled(join):
    """Two losses, each with centers that its update pulls, and a sum to which both add."""
    def model_fn(x):
        side = tf.cast(x[:, 0] > 0, tf.int32)
        pulled_by, added, losses = [], [], {}
        for name in ('one', 'two'):
            with tf.variable_scope('', reuse=tf.AUTO_REUSE):
                centers = tf.get_variable('centers_' + name, [2, 2], tf.float64,
                                          tf.constant_initializer(.3), trainable=False)
                total = tf.get_variable('total', [], tf.float64, tf.zeros_initializer(),
                                        trainable=False)
            difference = tf.gather(centers, side) - tf.matmul(x, variable(name, [3, 2], .4))
            losses[name] = tf.reduce_mean(tf.square(difference))
            with tf.control_dependencies([difference]):
                pulled_by.append(tf.scatter_sub(centers, side, .1 * difference))
                added.append(tf.assign_add(total, tf.reduce_sum(difference)))
        for update in join(pulled_by, added):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return {'loss': losses}
    return model_fn


@pytest.mark.parametrize('join', first_fast(1, [
    lambda pulled_by, added: [tf.group(*pulled_by)],
    lambda pulled_by, added: [tf.group(pulled_by[0], added[0])],
    lambda pulled_by, added: pulled_by + added]))
def test_what_other_towers_run_for_an_update_rides_where_the_update_does(join):
    turns = ['one', 'two', 'all', 'two']
    one, two = [by_towers(pulled(join), {}, turns, devices, names=('one', 'two'))
                for devices in (1, 2)]
    assert_same(one, two)


@pytest.mark.slow
def test_what_knows_of_losses_knows_them_by_name(tmp_path):
    with tf.Graph().as_default():
        built = towers.build_towers(gan, tf.constant(BATCH), optimizers(var_lists=OF_GAN), 2)
        assert list(built.loss) == list(built.gradients) == ['discriminator', 'generator']
        assert [v.op.name for _, v in built.gradients['generator']] == ['g/w']
        plan = str(built.plan)
        assert 'discriminator: AdamOptimizer, 2 variables; generator: MomentumOptimizer' in plan
        assert 'generator: 0.2; on the sum, steps as 2 x 0.2' in ' '.join(plan.split())
        assert not towers.audit(built).broken
        summary = towers.default_summaries(built)[0]
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            whole = session.run(built.loss)
            shown = {value.tag: value.simple_value for value in tf.Summary.FromString(
                session.run(summary)).value}
        assert {'train/loss/discriminator', 'train/gradient_norm/generator'} <= set(shown)
        assert shown['train/loss/generator'] == np.float32(whole['generator'])
        evaluation = towers.Evaluation(gan, tf.data.Dataset.from_tensors(BATCH), trained=built)
        assert {'loss/discriminator', 'loss/generator'} == set(evaluation.metrics)


SGD = tf.train.GradientDescentOptimizer


@pytest.mark.parametrize('arguments, text', first_fast(1, [
    (dict(optimizer={}), 'expected an optimizer for each loss'),
    (dict(optimizer={'generator': 'adam'}),
     "optimizer['generator']='adam' has no compute_gradients"),
    (dict(optimizer={'a': SGD(1.)}), "returned the losses 'discriminator', 'generator', and the "
     "optimizers are for 'a': return one loss for each optimizer and no other, {'loss': {'a': …}}"),
    (dict(var_lists={'generator': lambda all_: [
        tf.get_variable('further', [], tf.float64)]}),
     "the loss 'generator': none of the 1 variables has a gradient in any tower"),
    (dict(optimizer=SGD(1.)), "several losses, 'discriminator', 'generator', and there is one "
     "optimizer: pass one for each, optimizer={'discriminator': …, 'generator': …} (to check_tow"),
    (dict(var_lists={'generator': lambda all_: []}),
     "no trainable variable for 'generator' left by var_list"),
    (dict(var_lists={'generator': lambda all_: 3}), "var_list for 'generator' returned 3"),
    (dict(var_lists={}, generator=lambda pairs: 3),
     "transform_gradients for 'generator' returned 3"),
    (dict(regularization='add'), 'the model function returned several losses'),
    (dict(numerics=towers.Numerics(loss_scale=towers.LossScale())),
     'a loss scale (loss_scale=) goes with one loss, and there are several (discriminator, generat'),
    (dict(optimizer={'a': SGD(1.)}, cluster=towers.Cluster('ring', ['a:1', 'b:1'])),
     'cluster= goes with one loss without a name, and optimizer= is a dict (of a): pass the')]))
def test_errors(arguments, text):
    with tf.Graph().as_default():
        arguments = dict(dict(devices=2), **arguments)
        objectives = {name: arguments.pop(name) for name in ('var_lists', 'generator')
                      if name in arguments}
        with pytest.raises(towers.TowersError) as error:
            arguments.setdefault('optimizer', optimizers(**objectives) if (
                'optimizer' not in arguments) else None)
            towers.build_towers(gan, tf.constant(BATCH), **arguments)
        assert text in str(error.value)


def test_one_optimizer_for_two_losses_is_refused():
    one = SGD(1.)
    with tf.Graph().as_default(), pytest.raises(towers.InvalidArgumentError,
                                                match='an optimizer of its own for each'):
        towers.build_towers(gan, tf.constant(BATCH), {'discriminator': one, 'generator': one})
