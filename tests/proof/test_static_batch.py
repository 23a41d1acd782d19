"""Batches of static size: which numbers are read as the size of a shard, and what the line says."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.proof.analysis import analyse
from towers.proof.batch_norms import find_batch_norms
from towers.proof.question import Question
from towers.proof.states import Kind
from towers.proof.verdict import verdict_of
from case_marks import first_fast

SIZE = 4  # examples of a shard


def verdict(loss, inputs, adds_shards=False):
    operations = tf.get_default_graph().get_operations()
    analysis = analyse(operations, inputs, [loss])
    norms = find_batch_norms(analysis.as_built or analysis, operations)
    return verdict_of([loss], analysis, norms, Question(adds_shards, SIZE, 'tower'))


def line(loss, inputs):
    return verdict(loss, inputs).text


def batch(*shape):
    return tf.placeholder(tf.float32, (SIZE,) + shape)


def condition(*names, times=1):
    is_size = 'is the static size of a shard'
    if times > 1:
        is_size = 'was computed as %d times the static size of a shard, %d' % (times, SIZE)
    return 'proven, if %d in %d operation%s (%s) %s, and no other constant was computed from it ' \
        '(with a batch [None, ...] this condition falls away): ' % (
            times * SIZE, len(names), '' if len(names) == 1 else 's',
            ', '.join(map(repr, names)), is_size)


def test_a_loss_in_which_no_number_is_the_size():
    x = batch(6)
    assert line(tf.reduce_mean(tf.square(x)), x).startswith(
        'proven, if no constant of the model was computed from the static size of a shard, 4 (')


def test_a_divisor_of_values_that_may_be_computed_from_the_size_is_named():
    x = batch(6)
    gradient, = tf.gradients(tf.reduce_mean(tf.square(x)), x)  # divides by 24
    text = line(tf.reduce_mean(tf.square(x + gradient)), x)
    assert "no other constant, such as 'gradients/Mean_grad/Const_1', was computed from it (" in text
    with_temperature = tf.reduce_mean(tf.square(x / tf.constant(2. * SIZE, name='temperature')))
    assert ("proven, if no constant of the model, such as 'temperature', was computed from the "
            'static size of a shard, 4 (') in line(with_temperature, x)


def test_the_shape_of_random_numbers_beside_the_examples():
    x = batch(6)
    noise = tf.random_uniform(tf.constant([SIZE, 6], name='shape'))
    assert line(tf.reduce_mean(tf.reduce_max(x * noise, 1)), x).startswith(condition('shape'))


def test_numbers_that_another_output_has_are_no_condition():
    x = batch(6)
    first = tf.reduce_mean(x * tf.random_uniform(tf.constant([SIZE, 6], name='of_first')))
    second = tf.reduce_mean(x * tf.random_uniform(tf.constant([SIZE, 6], name='of_second')))
    analysis = analyse(tf.get_default_graph().get_operations(), x, [first, second])
    found = verdict_of([second], analysis, find_batch_norms(analysis, []), Question(
        False, SIZE, 'tower'))
    assert found.text.startswith(condition('of_second'))


def test_a_first_state_of_zeros():
    x = batch(6)
    zeros = tf.constant(0., shape=[SIZE, 3], name='state')
    joined = tf.concat([x, zeros], 1)
    assert line(tf.reduce_mean(tf.reduce_max(joined, 1)), x).startswith(condition('state'))


@pytest.mark.parametrize('version', ['v1', 'v2'])
def test_a_first_state_whose_length_is_not_followed_asks_for_a_batch_of_any_size(version):
    def loss_of(x, examples):
        weights, of_state = tf.ones([4, 3]), tf.ones([3, 3])

        def step(t, h):
            return t + 1, tf.tanh(tf.matmul(x[:, t], weights) + tf.matmul(h, of_state))
        h = looped(version, 3, lambda limit: tf.while_loop(
            lambda t, _: t < limit, step, [0, tf.zeros([examples, 3])])[1])
        return tf.reduce_mean(tf.reduce_max(h, 1))
    x, of_any_size = batch(5, 4), tf.placeholder(tf.float32, [None, 5, 4])
    text = line(loss_of(x, SIZE), x)
    assert text.startswith('not proven: ')
    assert text.endswith('; pass a batch [None, ...], and take sizes from tf.shape')
    if version == 'v1':
        assert (' combines the examples with a tensor whose length along their dimension is not '
                'known to come from the batch; ') in text
    loss = loss_of(of_any_size, tf.shape(of_any_size)[0])
    analysis = analyse(tf.get_default_graph().get_operations(), of_any_size, [loss])
    assert analysis.state(loss).kind is Kind.MEAN


def test_a_multiple_of_the_size_in_a_reshape():
    x = batch(3, 6)
    flat = tf.reshape(x, tf.constant([3 * SIZE, 6], name='shape'))
    assert line(tf.reduce_mean(tf.reduce_max(flat, 1)), x).startswith(
        condition('shape', times=3))


@pytest.mark.parametrize('index', [1, -1])
def test_a_number_of_a_shape_by_its_index(index):
    x = batch(6)
    size = tf.constant([6, SIZE], name='shape')[index]
    loss = tf.reduce_sum(tf.square(x)) / tf.cast(size, tf.float32)
    assert line(loss, x).startswith(condition('shape'))


def test_a_divisor_of_a_sum():
    x = batch(6)
    loss = tf.reduce_sum(tf.square(x)) / tf.constant(float(SIZE), name='size')
    assert line(loss, x).startswith(condition('size'))


def test_a_divisor_is_named_before_shapes():
    """A shape that was not computed from the size would not fit; a divisor would go unseen."""
    x = batch(6)
    noisy = x
    for name in ('one', 'another'):
        noisy *= tf.random_uniform(tf.constant([SIZE, 6], name=name))
    loss = tf.reduce_sum(tf.square(noisy)) / tf.constant(float(SIZE), name='size')
    assert "in 3 operations ('size', 'one', ...) is the static size" in line(loss, x)


def test_a_divisor_from_the_shape():
    x = batch(6)
    loss = tf.reduce_sum(tf.square(x)) / tf.cast(tf.shape(x, name='shape')[0], tf.float32)
    assert line(loss, x).startswith(condition('shape'))


def test_a_divisor_that_is_a_multiple():
    x = batch(6)
    loss = tf.reduce_sum(tf.square(x)) / tf.cast(tf.constant(6 * SIZE, name='size'), tf.float32)
    assert line(loss, x).startswith(condition('size', times=6))


def test_of_two_divisors_none_is_read():
    x = batch(6)
    loss = tf.reduce_sum(tf.square(x)) / tf.constant(4., name='a') / tf.constant(8., name='b')
    assert line(loss, x).startswith(
        'not proven: the loss is a sum over the examples, of which the towers take the mean, unless '
        "one of its divisors ('a', 'b') is the size of a shard; ")


def test_a_divisor_that_is_no_multiple_is_not_read():
    x = batch(6)
    assert line(tf.reduce_sum(x) / 6., x).startswith('not proven: the loss is a sum')


def test_the_length_of_what_loops_carry():
    was_v2 = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        x = batch(6)
        state = tf.fill(tf.constant([SIZE, 6], name='shape'), 0.)
        h = tf.while_loop(lambda t, _: t < 3, lambda t, h: (t + 1, tf.tanh(h + x)), [0, state])[1]
        loss = tf.reduce_mean(tf.reduce_max(h, 1))
    finally:
        if was_v2:
            tf.enable_control_flow_v2()
    assert line(loss, x).startswith(condition('shape'))


def test_the_output_of_a_transposed_convolution():
    x = batch(4, 4, 2)
    shape = tf.constant([SIZE, 8, 8, 3], name='shape')
    image = tf.nn.conv2d_transpose(x, tf.ones([2, 2, 3, 2]), shape, 2)
    assert line(tf.reduce_mean(tf.reduce_max(image, [1, 2, 3])), x).startswith(condition('shape'))


def test_the_gradient_of_a_mean_pooling():
    x = batch(4, 4, 2)
    shape = tf.constant([SIZE, 8, 8, 2], name='shape')
    image = tf.raw_ops.AvgPoolGrad(orig_input_shape=shape, grad=x, ksize=[1, 2, 2, 1],
                                   strides=[1, 2, 2, 1], padding='SAME')
    assert line(tf.reduce_mean(tf.reduce_max(image, [1, 2, 3])), x).startswith(condition('shape'))


def test_the_first_state_of_a_recurrent_cell_in_one_kernel():
    x = batch(6)
    zeros, peepholes = tf.zeros(tf.constant([SIZE, 3], name='shape')), tf.zeros([3])
    h = tf.raw_ops.LSTMBlockCell(x=x, cs_prev=zeros, h_prev=zeros, w=tf.ones([9, 12]), wci=peepholes,
                                 wcf=peepholes, wco=peepholes, b=tf.zeros([12])).h
    assert line(tf.reduce_mean(tf.reduce_max(h, 1)), x).startswith('proven, if 4 in ')


def test_the_end_of_a_slice_of_all_examples():
    x = batch(6)
    part = x[:tf.constant(SIZE, name='end'), 2:]
    assert line(tf.reduce_mean(tf.reduce_max(part, 1)), x).startswith(condition('end'))


@pytest.mark.parametrize('size_of', [
    lambda shape: shape[1:2], lambda shape: shape[:-1][1:], lambda shape: tf.split(shape, [1, 2])[1][:1]])
def test_a_part_of_a_shape(size_of):
    x = batch(6)
    size = size_of(tf.constant([6, SIZE, 2], name='shape'))
    flat = tf.reshape(x[:, None], tf.concat([size, [6]], 0))
    assert line(tf.reduce_mean(tf.reduce_max(flat, 1)), x).startswith(condition('shape'))


@pytest.mark.parametrize('couple', [
    lambda x: x - tf.reduce_mean(x, 0),
    lambda x: tf.reshape(x, [2, SIZE, 2]),  # halves of examples, as many as examples
    lambda x: tf.reshape(x, [SIZE // 2, 8]),  # two examples in a row
    lambda x: tf.transpose(x) * x,  # 4 features, 4 examples
    lambda x: tf.matmul(x, tf.random_uniform([SIZE, SIZE])) * tf.transpose(x),
    lambda x: x[:SIZE // 2] * x[SIZE // 2:],
    lambda x: tf.cumsum(x, 0) * tf.random_uniform([SIZE, 4]),
    lambda x: tf.gather(x, [1, 2, 3, 0]) * x,
    lambda x: x * tf.reshape(tf.range(4.), [4, 1]),  # another weight for each position
    lambda x: tf.stack([tf.reduce_sum(x[i]) for i in range(SIZE)]) * x,
    lambda x: tf.reduce_max(x * tf.random_uniform([SIZE, 4]), 0),
    lambda x: x * tf.Variable(tf.ones([SIZE, 4])),  # a weight of each place in the shard
    lambda x: tf.linalg.set_diag(tf.tensordot(x, x, [[1], [1]]), tf.zeros([SIZE])),
    # The examples are diagonals of one matrix; in others, the numbers of a vector.
    lambda x: tf.raw_ops.MatrixDiagV2(
        diagonal=x, k=[0, SIZE - 1], num_rows=-1, num_cols=-1, padding_value=0.),
    lambda x: tf.linalg.cross(tf.transpose(x[:3]), tf.ones([4, 3])),
    lambda x: tf.nn.softmax(x * tf.ones([SIZE, 1]), 0),
    lambda x: tf.square(tf.reduce_sum(x) / SIZE),
    lambda x: tf.transpose(x)[:SIZE] * x,
    lambda x: x[:SIZE // 2],
    lambda x: x[:SIZE, :SIZE - 1] - tf.reduce_max(x[:SIZE], 0)[:SIZE - 1],
    lambda x: tf.abs(tf.signal.stft(tf.transpose(x), SIZE, 1)),
    lambda x: tf.signal.frame(x, 2, 1, axis=0),
    lambda x: tf.signal.overlap_and_add(x, 2),
])
def test_what_couples_examples_is_not_proven_by_a_reading(couple):
    x = batch(4)
    assert line(tf.reduce_mean(tf.square(couple(x))), x).startswith('not proven: ')


def test_a_number_that_equals_the_size_stays_what_it_is_where_nothing_asks_for_it():
    x, y = batch(6), tf.placeholder(tf.int64, [SIZE])
    one_hot = tf.one_hot(y, SIZE)  # as many classes as examples
    scores = tf.matmul(x, tf.get_variable('w', [6, SIZE]))
    loss = tf.reduce_mean(tf.reduce_sum(one_hot * scores, 1))
    assert line(loss, (x, y)).startswith('proven, if no constant of the model ')


def test_a_sum_is_proven_for_towers_that_add_up():
    x = batch(6)
    noise = tf.random_uniform(tf.constant([SIZE, 6], name='shape'))
    found = verdict(tf.reduce_sum(x * noise), x, adds_shards=True)
    assert found.text.startswith(condition('shape')) and found.is_conditional
    assert not found.is_proven


def test_a_batch_norm_beside_a_reading():
    x = batch(6)
    x = x * tf.random_uniform(tf.constant([SIZE, 6], name='shape'))
    mean, variance = tf.nn.moments(x, [0])
    loss = tf.reduce_mean(tf.square((x - mean) / tf.sqrt(variance + .1)))
    assert 'but for 1 batch norm of each' in line(loss, [x.op.inputs[0]])


def test_inputs_of_two_sizes_are_not_read():
    x, z = batch(6), tf.placeholder(tf.float32, [2 * SIZE, 6])
    loss = tf.reduce_mean(x * tf.random_uniform([SIZE, 6])) + tf.reduce_mean(z)
    assert line(loss, (x, z)).startswith('not proven: the graph has the size of a shard, 4, in it')


def test_numbers_that_are_not_whole_stay_beside_a_size():
    x = batch(6)
    numbers = tf.constant([float(SIZE), .5])
    loss = tf.reduce_sum(x) / numbers[0] * numbers[1]
    assert line(loss, x).startswith('not proven: the loss is a sum')


def test_a_single_example_is_not_read():
    x = tf.placeholder(tf.float32, [1, 6])
    loss = tf.reduce_sum(x) / 2.
    analysis = analyse(tf.get_default_graph().get_operations(), x, [loss])
    assert analysis.with_size_constants is None


def looped(version, limit, loss_of):
    """A loss with a loop of `limit` iterations, in either control flow."""
    was_v2 = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if version == 'v2' else tf.disable_control_flow_v2)()
    try:
        return loss_of(limit)
    finally:
        (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()


@pytest.mark.parametrize('version', ['v1', 'v2'])
@pytest.mark.parametrize('limit, beginning', [
    (SIZE, "not proven: '"), (SIZE + 1, 'proven, if no constant of the model ')])
def test_a_loop_that_runs_as_often_as_a_shard_has_examples(version, limit, beginning):
    x = batch(6)
    h = looped(version, limit, lambda limit: tf.while_loop(
        lambda t, _: t < limit, lambda t, h: (t + 1, h * .9), [0, tf.square(x)])[1])
    text = line(tf.reduce_mean(h), x)
    assert text.startswith(beginning)
    assert ('decides how often a loop runs, and equals the static size of a shard; pass a batch '
            '[None' in text) == (limit == SIZE)


@pytest.mark.parametrize('version', first_fast(1, ['v1', 'v2']))
@pytest.mark.parametrize('limits', [(SIZE, 2), (2, SIZE)])
def test_a_loop_in_a_loop_one_of_which_runs_as_often_as_a_shard_has_examples(version, limits):
    def loss_of(limits):
        def inner(t, h):
            return t + 1, tf.while_loop(lambda u, _: u < limits[1], lambda u, h: (u + 1, h * .9),
                                        [0, h])[1]
        return tf.while_loop(lambda t, _: t < limits[0], inner, [0, tf.square(x)])[1]
    x = batch(6)
    text = line(tf.reduce_mean(looped(version, limits, loss_of)), x)
    assert 'decides how often a loop runs, and equals the static size of a shard' in text


def test_a_loop_that_the_loss_does_not_need_is_none_of_its_own():
    x = batch(6)
    h = looped('v1', SIZE, lambda limit: tf.while_loop(
        lambda t, _: t < limit, lambda t, h: (t + 1, h * .9), [0, tf.square(x)])[1])
    loss = tf.reduce_mean(x)
    analysis = analyse(tf.get_default_graph().get_operations(), x, [loss, h])
    found = verdict_of([loss], analysis, find_batch_norms(analysis, []), Question(
        False, SIZE, 'tower'))
    assert found.text.startswith('proven, if no constant of the model ')


def written_for_its_batch(x):
    """A loss whose numbers come from the static size of its batch."""
    size = int(x.shape[0])
    weights = tf.get_variable('w', [9, 6], tf.float64, tf.glorot_uniform_initializer(seed=1))
    joined = tf.concat([x, tf.zeros([size, 3], tf.float64)], 1)
    hidden = tf.reshape(tf.tanh(tf.matmul(joined, weights)), [size * 2, 3])
    return tf.reduce_sum(tf.square(tf.reduce_max(hidden, 1))) / size


@pytest.mark.parametrize('accumulate', first_fast(1, [1, 2]))
def test_where_the_condition_is_true_towers_are_one_device(accumulate):
    batch_of_8 = np.random.RandomState(0).randn(8, 6)
    report = towers.check_towers(written_for_its_batch, (batch_of_8,), num_towers=2,
                                 memory=towers.Memory(accumulate=accumulate))
    assert report.proof.startswith(
        'proven, if %d, or up to 2 times as much, in ' % (4 // accumulate))
    assert report.equal


def spectral_loss(x):
    """The distance of a filtered signal from another one, in spectra of two scales."""
    filtered = tf.signal.irfft(tf.signal.rfft(x) * tf.cast(
        tf.get_variable('filter', [13], initializer=tf.ones_initializer()), tf.complex64))
    loss = tf.reduce_mean(tf.abs(tf.signal.rfft2d(tf.reshape(filtered, [-1, 4, 6]))))
    for length in (8, 4):
        made, given = [tf.abs(tf.signal.stft(signal, length, length // 2, pad_end=True))
                       for signal in (filtered, tf.tanh(x))]
        mel = tf.tensordot(made, tf.signal.linear_to_mel_weight_matrix(
            3, length // 2 + 1, 8000), 1)
        loss += tf.reduce_mean(tf.abs(made - given)) + tf.reduce_mean(tf.log(mel + .1))
    return loss


@pytest.mark.slow
def test_a_loss_of_spectra_is_proven_and_equal():
    signals = np.random.RandomState(0).randn(6, 24).astype(np.float32)
    report = towers.check_towers(spectral_loss, (signals,), num_towers=2)
    assert report.proof.startswith('proven, if 3, or up to ')
    assert report.equal


@pytest.mark.parametrize('loss', [
    lambda y, z: tf.losses.sparse_softmax_cross_entropy(tf.cast(y[:, 0], tf.int32), z),
    tf.losses.softmax_cross_entropy, tf.losses.mean_squared_error])
def test_a_loss_of_tf_losses_counts_the_examples_by_ones(loss):
    x = batch(6)
    text = line(loss(x[:, :3], x[:, 3:]), x)
    assert text.startswith('proven, if 4') and 'is a mean over the examples' in text


def test_a_sum_over_the_sum_of_other_ones_is_no_mean():
    """The ones are as many as features, not as examples: no batch of another size has more."""
    x = batch(6)
    assert line(tf.reduce_sum(x) / tf.reduce_sum(tf.ones([6])), x).startswith('not proven')
