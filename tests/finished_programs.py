"""Programs that make placeholders and a loss, on towers and on one device."""

import tensorflow.compat.v1 as tf

import towers
from sample_models import momentum, relative_difference


def dense(x, units, name):
    kernel = tf.get_variable(name, [int(x.shape[-1]), units], x.dtype)
    return tf.matmul(x, kernel)


def mean_square(prediction, y):
    return tf.reduce_mean(tf.square(prediction - y))


def placeholders(arrays):
    """A placeholder of any batch size for each array."""
    return tuple(tf.placeholder(array.dtype, (None,) + array.shape[1:]) for array in arrays)


def plain_step(loss, make_optimizer=momentum):
    """The train op of a textbook: the updates run before the optimizer."""
    optimizer = make_optimizer()
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    with tf.control_dependencies([loss] + [gradient for gradient, _ in pairs]):
        updates = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    with tf.control_dependencies([updates]):
        return optimizer.apply_gradients(pairs)


def trained(session, fetch, train_op, feed, initial, steps=3):
    """(values of `fetch` at each step, {name: value} of all variables before, and after)."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])
    for variable in tf.global_variables():
        if variable.op.name in initial:
            variable.load(initial[variable.op.name], session)
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    before = session.run(variables)
    values = [session.run([fetch, train_op], feed)[0] for _ in range(steps)]
    return values, before, session.run(variables)


def check_equal(make_loss, arrays, num_towers=2, make_optimizer=momentum, tolerance=1e-12,
                steps=3, feed=None, **options):
    """Trains a program that makes placeholders and a loss, on towers and on one device, and checks
    losses, names and values of all variables: `BuiltTowers`. `feed` gives further feeds."""
    feed = feed or (lambda: {})
    options.setdefault('reduction', 'mean')
    with tf.Graph().as_default():
        inputs = placeholders(arrays)
        loss = make_loss(*inputs)
        built = towers.build_towers(loss, inputs, make_optimizer(), num_towers, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            fed = dict(zip(inputs, arrays))
            fed.update(feed())
            ours, initial, after = trained(session, built.loss, built.train_op, fed, {}, steps)
            of_program = session.run(loss, fed)
    with tf.Graph().as_default():
        inputs = placeholders(arrays)
        loss = make_loss(*inputs)
        train_op = plain_step(loss, make_optimizer)
        with tf.Session(config=towers.session_config(4)) as session:
            fed = dict(zip(inputs, arrays))
            fed.update(feed())
            theirs, _, expected = trained(session, loss, train_op, fed, initial, steps)
            one_device = session.run(loss, fed)
    assert sorted(after) == sorted(expected)
    for name, value in expected.items():
        assert relative_difference(after[name], value) < tolerance, name
    assert relative_difference(ours, theirs) < tolerance
    assert relative_difference(of_program, one_device) < tolerance
    return built
