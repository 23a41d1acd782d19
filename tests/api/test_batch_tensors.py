"""`built.of(tensor)`: the batch's value of any tensor of a finished model."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd, switched

X, Y = samples.vectors(7)
STEPS = {'evaluation': None, 'training': sgd}


def placeholders():
    return tf.placeholder(tf.float64, [None, 6], 'x'), tf.placeholder(tf.float64, [None, 3], 'y')


def dense(x, units, name):
    return tf.matmul(x, tf.get_variable(name, [int(x.shape[-1]), units], x.dtype))


def model(x, y):
    """`(logits, loss)` with batch norm, dropout by a fed number, and a branch."""
    keep = tf.placeholder_with_default(tf.constant(1., tf.float64), [], 'keep')
    h = dense(x, 4, 'a')
    mean, variance = tf.nn.moments(h, [0], name='moments')
    h = tf.tanh(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)) * keep
    h = tf.cond(keep > 0., lambda: h * 2., lambda: h, name='branch')
    h.set_shape([None, 4])
    logits = dense(h, 3, 'b')
    return logits, tf.reduce_mean(tf.square(logits - y))


def beside_the_loss(x, y, logits):
    """Tensors of a program that its loss does not need."""
    right = tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1))
    by_branch = tf.cond(tf.placeholder_with_default(True, [], 'flag'),
                        lambda: tf.tanh(logits), lambda: logits)
    rows = tf.map_fn(lambda row: tf.reduce_max(row), logits)
    return {'accuracy': tf.reduce_mean(tf.cast(right, tf.float32)),
            'number right': tf.reduce_sum(tf.cast(right, tf.int32)),
            'rows': tf.nn.softmax(logits), 'turned': tf.transpose(logits) + 1.,
            'of a branch': by_branch, 'of a loop': rows, 'top': tf.nn.top_k(logits, 2)[1],
            'input': x, 'logits': logits, 'inside': x.graph.get_tensor_by_name('Tanh:0')}


@pytest.mark.slow
@pytest.mark.parametrize('step, num_towers', [
    ('training', 3), pytest.param('evaluation', 3, marks=pytest.mark.slow),
    pytest.param('training', 1, marks=pytest.mark.slow)])
def test_tensors_of_the_program_equal_one_device(step, num_towers):
    with switched('control_flow_v2', False):
        x, y = placeholders()
        logits, loss = model(x, y)
        tensors = beside_the_loss(x, y, logits)
    optimizer = STEPS[step] and STEPS[step]()
    built = towers.build_towers(loss, (x, y), optimizer, num_towers, 'mean', remainder='weight',
                                batch_norm='sync')
    of_batch = {name: built.of(tensor) for name, tensor in tensors.items()}
    assert all(built.of(tensor) is of_batch[name] for name, tensor in tensors.items())
    names = {op.name for op in samples.step_operations(list(of_batch.values()))}
    assert names.isdisjoint({'MatMul', 'Tanh', 'Softmax', loss.op.name, 'map/while/LoopCond'})
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        ours, theirs = session.run([of_batch, tensors], {x: X, y: Y, 'keep:0': .5})
        for name, expected in theirs.items():
            assert ours[name].dtype == expected.dtype
            np.testing.assert_allclose(ours[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_step_computes_nothing_twice():
    """A metric beside the step takes what the step has computed."""
    with switched('control_flow_v2', False):
        x, y = placeholders()
        logits, loss = model(x, y)
        accuracy = beside_the_loss(x, y, logits)['accuracy']
    built = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')

    def matrix_products(fetches):
        return sum(op.type == 'MatMul' for op in samples.step_operations(fetches))
    batch_norm_of_each_shard = matrix_products([built.train_op])
    assert batch_norm_of_each_shard == matrix_products([built.train_op, built.of(accuracy)])
    for tower, device in enumerate(built.devices):
        scope = 'tower_%d/of_program_0/' % tower
        devices = {op.device for op in tf.get_default_graph().get_operations()
                   if op.name.startswith(scope) and op.type == 'ArgMax'}
        assert devices == {device}


def maximum(x, y, logits):
    return tf.reduce_max(logits)


def with_noise(x, y, logits):
    return tf.reduce_mean(logits + tf.random_normal(tf.shape(logits), dtype=tf.float64))


def inside_a_branch(x, y, logits):
    found = []
    tf.cond(tf.placeholder_with_default(True, []), lambda: found.append(tf.tanh(logits)) or found[0],
            lambda: logits)
    return found[0]


def with_another_variable(x, y, logits):
    return tf.reduce_mean(dense(logits, 2, 'c'))


def recurrent(x, y):
    """`(last state, sum of the states, number of turns, loss)`: the loss needs the sum alone."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)

    def turn(i, state, total):
        state = tf.tanh(tf.matmul(state, kernel))
        return i + 1, state, total + state
    number, state, total = tf.while_loop(lambda i, *_: i < 3, turn, (0, x, tf.zeros_like(x)))
    return state, total, number, tf.reduce_mean(tf.square(dense(total, 3, 'b') - y))


@pytest.mark.slow
def test_results_of_a_loop_of_which_the_loss_needs_one():
    with switched('control_flow_v2', False):
        x, y = placeholders()
        state, total, number, loss = recurrent(x, y)
        tensors = [state, total, number, tf.reduce_mean(state), tf.reduce_sum(state + total)]
    built = towers.build_towers(loss, (x, y), sgd(), 3, 'mean', remainder='weight')
    of_batch = [built.of(tensor) for tensor in tensors]
    products = [op.type == 'MatMul' for op in samples.step_operations(of_batch)]
    assert sum(products) == 3  # one in the loop of each tower
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        for ours, theirs in session.run(list(zip(of_batch, tensors)), {x: X, y: Y}):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_a_map_over_the_batch_itself_is_on_each_tower():
    """TensorFlow puts the operation that fills the array beside the batch, which is elsewhere."""
    with switched('control_flow_v2', False):
        x, y = placeholders()
        loss = tf.reduce_mean(tf.square(dense(x, 3, 'only') - y))
        largest = tf.map_fn(lambda row: tf.reduce_max(row), x)
    built = towers.build_towers(loss, (x, y), sgd(), 3, 'mean', remainder='weight')
    of_batch = built.of(largest)
    with tf.Session(config=towers.session_config(3)) as session:
        np.testing.assert_array_equal(session.run(of_batch, {x: X, y: Y}), X.max(1))


def test_a_summary_has_the_values_of_the_batch():
    """Also one of a model that is fed elsewhere than its placeholders are."""
    x, y = tf.placeholder(tf.float64, [2, 6], 'part'), tf.placeholder(tf.float64, [2, 3])
    logits = dense(x, 3, 'a')
    loss = tf.reduce_mean(tf.square(logits - y))
    for summary, name, value in [(tf.summary.scalar, 'loss', loss),
                                 (tf.summary.histogram, 'logits', logits),
                                 (tf.summary.scalar, 'rate', tf.constant(.5))]:
        summary(name, value)
    merged = tf.summary.merge_all()
    inputs = tf.placeholder(tf.float64, [6, 6]), tf.placeholder(tf.float64, [6, 3])
    built = towers.build_towers(loss, dict(zip((x, y), inputs)), sgd(), 3, 'mean')
    assert built.plan.line('to fetch').endswith(':0 is fed, too')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        feed = {built.of(x): X[:6], built.of(y): Y[:6]}  # which are `inputs`
        value, rows, text = session.run(
            [built.loss, built.of(logits), built.of(merged)], feed)
        session.run([built.train_op, built.of(merged)], feed)
    values = {each.tag: each for each in tf.Summary.FromString(text).value}
    assert sorted(values) == ['logits', 'loss', 'rate']
    np.testing.assert_allclose(values['loss'].simple_value, value, rtol=1e-6)
    np.testing.assert_allclose(values['logits'].histo.sum, rows.sum(), rtol=1e-6)


def test_a_sum_over_a_static_number_of_examples_is_refused():
    """An accuracy that divides by the size, of a part or of the batch, looks like its sum."""
    x, y = tf.placeholder(tf.float64, [2, 6]), tf.placeholder(tf.float64, [2, 3])
    logits = dense(x, 3, 'a')
    right = tf.cast(tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1)), tf.float32)
    accuracy = tf.reduce_sum(right) / 2.
    inputs = tf.placeholder(tf.float64, [4, 6]), tf.placeholder(tf.float64, [4, 3])
    built = towers.build_towers(tf.reduce_mean(tf.square(logits - y)),
                                dict(zip((x, y), inputs)), sgd(), 2, 'mean')
    with pytest.raises(towers.ModelFunctionError, match='the model is for 2 of them'):
        built.of(accuracy)
    assert built.of(right).shape.as_list() == [4]


@pytest.mark.slow
@pytest.mark.parametrize('make, error, text', [
    (maximum, towers.ModelFunctionError, r"of Max:0, of shape \(\), .* \('Max' \(Max\) is taken"),
    (with_noise, towers.InvalidArgumentError, 'RandomStandardNormal.*, which the towers do not run'),
    (inside_a_branch, towers.InvalidArgumentError, 'is in a loop or a branch'),
    (with_another_variable, towers.InvalidArgumentError, 'computed from the variable c by operations that the')])
def test_tensors_that_are_none_of_the_step_are_refused(make, error, text):
    x, y = placeholders()
    with switched('control_flow_v2', False):
        logits, loss = model(x, y)
        tensor = make(x, y, logits)
    built = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')
    with pytest.raises(error, match=text) as caught:
        built.of(tensor)
    assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_tensors_that_are_made_after_the_build():
    with switched('control_flow_v2', False):
        x, y = placeholders()
        logits, loss = model(x, y)
    built = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')
    late = tf.reduce_mean(tf.square(logits))
    of_batch = built.of(late)
    assert of_batch is not late
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        value = session.run(of_batch, {x: np.concatenate([X[:3]] * 2), y: np.concatenate([Y[:3]] * 2)})
        expected = session.run(late, {x: X[:3]})
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    with pytest.raises(towers.InvalidArgumentError, match='which the build has made'):
        built.of(built.loss)


@pytest.mark.slow
def test_tensors_of_another_graph_are_refused():
    x, y = placeholders()
    built = towers.build_towers(model(x, y)[1], (x, y), sgd(), 2, 'mean', remainder='weight')
    with tf.Graph().as_default(), pytest.raises(towers.InvalidArgumentError, match='of the graph of the build'):
        built.of(tf.constant(1.))


@pytest.mark.parametrize('options', [
    dict(memory=towers.Memory(accumulate=2)),
    pytest.param(dict(variables=towers.VariablePlacement('replicated')), marks=pytest.mark.slow),
    pytest.param(dict(pipeline=towers.Pipeline(stages='auto')), marks=pytest.mark.slow)],
    ids=['accumulate', 'replicated', 'stages'])
def test_beside_modes(options):
    """Micro-batches, replicas of the variables, and towers of two devices."""
    devices = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']] if 'pipeline' in options else 2
    x, y = placeholders()
    logits = dense(tf.tanh(dense(x, 4, 'a')), 3, 'b')
    loss = tf.reduce_mean(tf.square(logits - y))
    right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1)), tf.float32))
    built = towers.build_towers(loss, (x, y), sgd(), devices, 'mean', remainder='weight', **options)
    of_batch = [built.of(right), built.of(logits)]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        if built.replicas is not None:
            session.run(built.replicas.refresh())
        ours, theirs = session.run([of_batch, [right, logits]], {x: X, y: Y})
        for mine, expected in zip(ours, theirs):
            np.testing.assert_allclose(mine, expected, rtol=1e-6)
        session.run([built.train_op] + of_batch, {x: X, y: Y})


def test_a_statistic_of_a_batch_norm_of_each_shard_is_refused():
    x, y = placeholders()
    h = dense(x, 3, 'a')
    mean, variance = tf.nn.moments(h, [0])
    normalized = tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)
    built = towers.build_towers(tf.reduce_mean(tf.square(normalized - y)), (x, y), sgd(), 2, 'mean')
    assert built.of(normalized).shape.as_list() == [None, 3]  # as the loss has it
    for statistic in (variance, tf.sqrt(variance)):
        with pytest.raises(towers.ModelFunctionError, match='is not proven from those of the towers'):
            built.of(statistic)
