"""Programs whose variables were made before the build, several features in each: as functions of
the batch and as finished models, beside plain TF1 on one device."""

import typing

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import mean_squared_error, momentum, relative_difference, switched, vectors

X, Y = vectors(8)
IDS = np.random.RandomState(1).randint(0, 7, [8, 4])


def weights(name, *shape, **options):
    values = np.random.RandomState(len(name)).randn(*shape) * .3
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(values), **options)


def clipped(pairs):
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], .3)
    return list(zip(gradients, [variable for _, variable in pairs]))


class TwoRates(tf.train.Optimizer):
    """The first variable by gradient descent, the others by Adam."""

    def __init__(self):
        super(TwoRates, self).__init__(False, 'TwoRates')
        self._slow, self._fast = tf.train.GradientDescentOptimizer(.01), tf.train.AdamOptimizer(.1)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        return tf.group(self._slow.apply_gradients(pairs[:1]),
                        self._fast.apply_gradients(pairs[1:], global_step))


# ---- the programs: each makes its variables, and gives a model function --------------------------

def branches_on_a_feed():
    """Each branch has a weight of its own; the loss has L2 terms of both."""
    a, b = weights('a', 6, 3), weights('bb', 6, 3)
    is_first = tf.placeholder_with_default(True, [])

    def model_fn(x, y):
        prediction = tf.cond(is_first, lambda: tf.matmul(x, a),
                             lambda: tf.matmul(x, b) + tf.nn.l2_loss(a))
        return mean_squared_error(prediction, y) + .01 * (tf.nn.l2_loss(a) + tf.nn.l2_loss(b))
    return model_fn


def spectral_norm():
    """A vector that the forward pass reads, writes, and reads anew."""
    w, u = weights('w', 6, 3), weights('uu', 1, 3, trainable=False)

    def model_fn(x, y):
        v = tf.nn.l2_normalize(tf.matmul(u, w, transpose_b=True))
        new_u = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w)))
        norm = tf.reduce_sum(tf.matmul(tf.stop_gradient(v), w) * new_u)
        with tf.control_dependencies([tf.assign(u, new_u)]):
            return mean_squared_error(tf.matmul(x, w) / tf.identity(norm), y)
    return model_fn


def tied_embedding():
    """One table that is looked up and multiplied with, its gradient clipped by the norm of all."""
    table = weights('table', 7, 3)

    def model_fn(ids, y):
        hidden = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
        losses = tf.nn.softmax_cross_entropy_with_logits(
            labels=tf.one_hot(ids[:, 0], 7, dtype=tf.float64),
            logits=tf.matmul(hidden, table, transpose_b=True))
        return tf.reduce_mean(losses) + 0. * tf.reduce_mean(y)
    return model_fn


def loop_until_a_limit():
    """The number of turns of a loop is in a variable, which no gradient reaches."""
    w, limit = weights('w', 6, 6), tf.get_variable(
        'limit', [], tf.float64, tf.constant_initializer(3.), trainable=False)

    def model_fn(x, y):
        def turn(i, hidden):
            return i + 1., tf.tanh(tf.matmul(hidden, w)) + x
        _, hidden = tf.while_loop(lambda i, _: i < limit, turn,
                                  (tf.constant(0., tf.float64), tf.identity(x)))
        return mean_squared_error(hidden[:, :3], y)
    return model_fn


def recurrent_lookup():
    """Rows of a table, step by step through a recurrent layer."""
    table, onwards = weights('table', 7, 3), weights('on', 3, 3)

    def model_fn(ids, y):
        rows = tf.transpose(tf.nn.embedding_lookup(table, ids), [1, 0, 2])
        states = tf.scan(lambda h, row: tf.tanh(tf.matmul(h, onwards) + row), rows,
                         tf.zeros_like(y))
        return mean_squared_error(states[-1], y)
    return model_fn


def table_of_parts():
    """A partitioned table."""
    table = tf.get_variable('table', [7, 3], tf.float64, tf.constant_initializer(.1),
                            partitioner=tf.fixed_size_partitioner(2))

    def model_fn(ids, y):
        rows = tf.nn.embedding_lookup(table, ids, partition_strategy='div')
        return mean_squared_error(tf.reduce_mean(rows, 1), y) + tf.nn.l2_loss(
            tf.convert_to_tensor(table))
    return model_fn


def penalty_of_a_gradient():
    a, b = weights('a', 6, 5), weights('bb', 5, 3)

    def model_fn(x, y):
        prediction = tf.matmul(tf.tanh(tf.matmul(x, a)), b)
        gradient, = tf.gradients(prediction, [x])
        return mean_squared_error(prediction, y) + tf.reduce_mean(
            tf.reduce_sum(tf.square(gradient), 1))
    return model_fn


def counts_of_classes():
    """Rows that a tower's examples add to, after all of the batch has read them."""
    w = weights('w', 7, 3)
    counts = tf.get_variable('counts', [7], tf.float64, tf.ones_initializer(), trainable=False)

    def model_fn(ids, y):
        each = 1. / tf.gather(counts, ids)
        with tf.control_dependencies([each]):
            flat = tf.reshape(ids, [-1])
            written = tf.scatter_add(counts, flat, tf.ones_like(flat, tf.float64))
        with tf.control_dependencies([written]):
            rows = tf.nn.embedding_lookup(w, ids) * each[:, :, None]
        return mean_squared_error(tf.reduce_sum(rows, 1), y)
    return model_fn


def branches_within_a_map():
    """A branch for each example, in it another one by a feed; each has weights of its own."""
    a, b = weights('a', 6), weights('bb', 6)
    is_second = tf.placeholder_with_default(True, [])
    layers = [weights('layer%d' % layer, 6, 6) for layer in range(3)]

    def model_fn(x, y):
        def of_one(row):
            def other():
                return tf.cond(is_second, lambda: row * b, lambda: row + a)
            return tf.cond(tf.reduce_sum(row) > 0, lambda: row * a, other)
        hidden = tf.map_fn(of_one, x)
        for layer in layers:
            hidden = tf.tanh(tf.matmul(hidden, layer))
        return mean_squared_error(hidden[:, :3], y)
    return model_fn


def annealed_by_the_step():
    """A term of the loss grows with the step, which the train op counts."""
    w, v = weights('w', 6, 4), weights('vv', 4, 3)

    def model_fn(x, y):
        step = tf.cast(tf.train.get_global_step(), tf.float64)
        share = tf.minimum(step / 3., tf.ones_like(step))
        hidden = tf.tanh(tf.matmul(x, w))
        penalties = tf.reduce_sum(tf.square(hidden), 1)
        return mean_squared_error(tf.matmul(hidden, v), y) + share * tf.reduce_mean(penalties)
    return model_fn


def weight_norm():
    """A length that begins as that of another variable's columns."""
    v = weights('vv', 6, 3)
    g = tf.get_variable('g', initializer=tf.norm(v.initial_value, axis=0))

    def model_fn(x, y):
        return mean_squared_error(tf.matmul(x, v / tf.norm(v, axis=0) * g), y)
    return model_fn


def pulled_centers():
    """Class centers that follow the features of their examples, by updates after the loss."""
    w = weights('w', 6, 3)
    centers = weights('centers', 4, 3, trainable=False)

    def model_fn(x, y):
        features = tf.tanh(tf.matmul(x, w))
        classes = tf.argmax(y, 1)
        differences = tf.gather(centers, classes) - features
        loss = mean_squared_error(features, y) + .1 * tf.reduce_mean(tf.square(differences))
        with tf.control_dependencies([loss]):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                                 tf.scatter_sub(centers, classes, .5 * differences))
        return loss
    return model_fn


def gated_recurrence():
    """An array that a loop fills, with branches in its turns; then a scan over it."""
    onwards, gate = weights('on', 2, 2), weights('gate', 2)
    is_gated = tf.placeholder_with_default(True, [])

    def model_fn(x, y):
        steps = tf.reshape(x, [-1, 3, 2])

        def turn(i, state, states):
            new = tf.tanh(tf.matmul(state, onwards) + steps[:, i])
            new = tf.cond(is_gated, lambda: tf.cond(i > 1, lambda: new * gate, lambda: new + gate),
                          lambda: new)
            return i + 1, new, states.write(i, new)
        states = tf.while_loop(lambda i, *_: i < 3, turn, (
            0, tf.zeros_like(steps[:, 0]), tf.TensorArray(tf.float64, 3)))[2]
        total = tf.scan(lambda last, new: last * .5 + new, states.stack())
        return mean_squared_error(total[-1], y[:, :2])
    return model_fn


class Lookahead(tf.train.AdamOptimizer):
    """Every second step the weights go half the way from where they were (Zhang et al. 2019)."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        slow = [tf.Variable(variable.initial_value, trainable=False,
                            name='slow_' + variable.op.name) for variable in variables]
        count = tf.Variable(0, trainable=False, name='count')
        with tf.control_dependencies([super().apply_gradients(pairs, global_step)]):
            counted = tf.assign_add(count, 1)

        def synchronize():
            moved = [tf.assign_add(each, .5 * (variable - each))
                     for each, variable in zip(slow, variables)]
            with tf.control_dependencies(moved):
                return tf.group(*[tf.assign(variable, each)
                                  for each, variable in zip(slow, variables)])
        with tf.control_dependencies([counted]):
            return tf.cond(tf.equal(count.read_value() % 2, 0), synchronize, tf.no_op)


class Program(typing.NamedTuple):
    make: typing.Callable
    data: tuple = (X, Y)
    make_optimizer: typing.Callable = momentum
    transform: typing.Optional[typing.Callable] = None
    can_accumulate: bool = True
    is_slow: bool = False
    options: typing.Optional[dict] = None  # of one build more
    has_branch_in_loop: bool = False  # of which TF 1.15 has no gradient by a resource variable


PROGRAMS = {
    'branches': Program(branches_on_a_feed, make_optimizer=TwoRates),
    'spectral norm': Program(spectral_norm),
    'tied': Program(tied_embedding, (IDS, Y), lambda: tf.train.AdagradOptimizer(.1), clipped,
                    is_slow=True),
    'loop': Program(loop_until_a_limit, is_slow=True),
    'recurrent': Program(recurrent_lookup, (IDS, Y), lambda: tf.train.AdamOptimizer(.05),
                         is_slow=True),
    'parts': Program(table_of_parts, (IDS, Y)),
    'penalty': Program(penalty_of_a_gradient, make_optimizer=TwoRates, is_slow=True),
    'counts': Program(counts_of_classes, (IDS, Y), can_accumulate=False),
    'map': Program(branches_within_a_map, is_slow=True, has_branch_in_loop=True, options=dict(
        memory=towers.Memory(recompute='auto'))),
    'annealed': Program(annealed_by_the_step, make_optimizer=TwoRates, is_slow=True, options=dict(
        memory=towers.Memory(accumulate=2, recompute='auto'), shares=[3, 1])),
    'weight norm': Program(weight_norm, make_optimizer=lambda: Lookahead(.05), is_slow=True,
                           options=dict(copies='reuse')),
    'centers': Program(pulled_centers, is_slow=True, options=dict(
        variables=towers.VariablePlacement('replicated'))),
    'gated': Program(gated_recurrence, is_slow=True, has_branch_in_loop=True, options=dict(
        copies='reuse'))}


def steps_of(session, loss, gradients, train_op, steps=3):
    """[(loss, {name: gradient})] of each step, fetched in its run, and {name: variable}."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    found = [session.run([loss, gradients, train_op])[:2] for _ in range(steps)]
    return found, session.run({each.op.name: each for each in tf.global_variables()})


def on_one_device(program):
    use_resource = not program.has_branch_in_loop
    with tf.Graph().as_default(), tf.Session() as session, tf.variable_scope(
            '', use_resource=use_resource):
        tf.train.create_global_step()
        model_fn = program.make()
        loss, optimizer = model_fn(*map(tf.constant, program.data)), program.make_optimizer()
        pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
        if program.transform is not None:
            pairs = program.transform(pairs)
        gradients = {v.op.name: tf.convert_to_tensor(gradient) for gradient, v in pairs}
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies([loss] + list(gradients.values()) + updates):
            train_op = optimizer.apply_gradients(pairs, tf.train.get_global_step())
        return steps_of(session, loss, gradients, train_op)


def on_towers(program, is_finished, **options):
    with tf.Graph().as_default():
        tf.train.create_global_step()
        model_fn = program.make()
        inputs = tuple(tf.placeholder_with_default(each, [None] + list(each.shape[1:]))
                       for each in program.data)
        built = towers.build_towers(
            model_fn(*inputs) if is_finished else model_fn, inputs,
            towers.Objective(program.make_optimizer(), transform_gradients=program.transform),
            2, 'mean', remainder='weight', global_step=tf.train.get_global_step(), **options)
        assert not towers.audit(built).broken
        gradients = {v.op.name: tf.convert_to_tensor(gradient) for gradient, v in built.gradients}
        with tf.Session(config=towers.session_config(built.devices)) as session:
            return steps_of(session, built.loss, gradients, built.train_op)


@pytest.mark.slow
@pytest.mark.parametrize('use_resource', [
    False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if PROGRAMS[name].is_slow else [])
    for name in sorted(PROGRAMS)])
def test_a_program_is_one_devices(name, use_resource):
    program = PROGRAMS[name]
    if program.has_branch_in_loop and use_resource and tf.version.VERSION < '2':
        pytest.skip('TF 1.15 has no gradient of a resource variable in a branch in a loop')
    ways = [dict(is_finished=False), dict(is_finished=True)]
    if program.can_accumulate:
        ways.append(dict(is_finished=False, memory=towers.Memory(accumulate=2)))
    if program.options is not None:
        ways.append(dict(is_finished=False, **program.options))
    with switched('control_flow_v2', False):
        steps, values = on_one_device(program)
        for way in ways:
            with switched('resource_variables', use_resource):
                found_steps, found_values = on_towers(program, **way)
            assert set(found_values) == set(values)
            for step, wanted in list(zip(found_steps, steps)) + [
                    ((0., found_values), (0., values))]:
                assert relative_difference(step[0], wanted[0]) < 1e-12, way
                assert set(step[1]) == set(wanted[1])
                for each in wanted[1]:
                    assert relative_difference(step[1][each], wanted[1][each]) < 1e-10, (way, each)
