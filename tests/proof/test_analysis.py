"""What the analysis says of inputs of every kind, and of values other than losses."""

import losses
import pytest
import tensorflow.compat.v1 as tf

from towers.proof.analysis import analyse
from towers.proof.batch_norms import find_batch_norms
from towers.proof.states import Kind
from towers.proof.question import Question
from towers.proof.verdict import verdict_of

MEAN_OF_TOWERS = Question(adds_shards=False, static_size=None, part_name='tower')


def analysed(fetches, inputs):
    return analyse(tf.get_default_graph().get_operations(), inputs, fetches)


def verdict(loss, inputs):
    analysis = analysed([loss], inputs)
    norms = find_batch_norms(analysis, tf.get_default_graph().get_operations())
    return verdict_of([loss], analysis, norms, MEAN_OF_TOWERS).text


def test_inputs_may_be_a_nest_of_which_some_are_not_used():
    inputs = losses.make_inputs(['x', 'y', 'tags'])
    loss = losses.INDEPENDENT['softmax_cross_entropy'](inputs['x'], inputs['y'])
    assert verdict(loss, {'a': inputs['x'], 'b': [inputs['y'], inputs['tags'], None]}).startswith(
        'proven: ')


def test_an_input_that_is_handed_on_has_the_examples():
    x = losses.make_inputs(['x'])['x']
    found = analysed([tf.reduce_mean(x)], x)
    assert found.state(x).kind is Kind.PER_EXAMPLE
    assert found.state(tf.constant(1.)).kind is Kind.INDEPENDENT  # made outside of the forward pass


def test_a_scalar_among_the_inputs_is_the_same_for_all_towers():
    x, rate = losses.make_inputs(['x'])['x'], tf.placeholder(tf.float32, [])
    assert verdict(tf.reduce_mean(x) * rate, (x, rate)).startswith('proven: ')


def test_a_placeholder_of_no_known_shape_is_a_condition_of_the_proof():
    x, rate = losses.make_inputs(['x'])['x'], tf.placeholder(tf.float32, name='rate')
    assert verdict(tf.reduce_mean(x * rate), x).startswith("proven, if 'rate' is fed a scalar")


def test_lengths_that_are_not_static_may_have_to_be_equal():
    x, z = [tf.placeholder(tf.float32, [None, None]) for _ in range(2)]
    assert verdict(tf.reduce_mean(tf.reduce_max(x * z, 1)), (x, z)).startswith('proven: ')
    assert verdict(tf.reduce_mean(tf.reduce_max(x * z, 0)), (x, z)).startswith('not proven: ')


def test_rows_of_a_mask_have_no_size_that_is_known():
    inputs = losses.make_inputs(['x', 'y'])
    rows = tf.boolean_mask(inputs['x'], inputs['y'] > 0)
    found = analysed([rows], inputs)
    assert found.state(rows).kind is Kind.ROWS
    total = tf.reduce_sum(rows)
    assert verdict(total / losses.floats(losses.size(inputs['x'])), inputs).startswith('proven: ')
    assert verdict(total / losses.floats(losses.size(rows)), inputs).startswith('not proven: ')


def test_lengths_of_a_sparse_tensor_of_unknown_rank_are_not_taken_for_that_of_the_batch():
    x, tags = losses.make_inputs(['x'])['x'], tf.sparse_placeholder(tf.int64)
    lengths = losses.floats(tags.dense_shape)
    for length in (tags.dense_shape[-1], lengths[-1], tf.reduce_sum(lengths)):
        line = verdict(tf.reduce_sum(x) / losses.floats(length), (x, tags))
        assert line.startswith('not proven: ')


def test_rows_go_back_to_their_places():
    inputs = losses.make_inputs(['seq', 'mask'])
    places = tf.cast(tf.where(tf.reshape(inputs['mask'], [-1]) > 0), tf.int32)
    words = tf.tanh(tf.gather_nd(tf.reshape(inputs['seq'], [-1, 4]), places))
    filled = tf.scatter_nd(places, words, tf.stack([losses.size(inputs['seq']) * 5, 4]))
    loss = tf.reduce_mean(tf.reduce_max(tf.reshape(filled, [-1, 5, 4]), 1))
    assert verdict(loss, inputs).startswith('proven: ')


def test_the_gradient_of_a_slice_has_the_examples_where_they_were():
    seq = losses.make_inputs(['seq'])['seq']
    [gradient] = tf.gradients(tf.reduce_sum(tf.square(seq[:, 1, None])), seq)
    assert verdict(tf.reduce_mean(tf.norm(gradient, axis=[1, 2])), seq).startswith('proven: ')
    [gradient] = tf.gradients(tf.reduce_sum(tf.square(seq[1:])), seq)
    assert verdict(tf.reduce_mean(gradient), seq).startswith('not proven: ')


def test_a_custom_gradient_inside_of_a_function_is_seen():
    was_v2 = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    try:
        x = losses.make_inputs(['x'])['x']
        w = losses.variable('w', [6, 1])

        @tf.custom_gradient
        def clipped(t):
            return tf.identity(t), lambda g: tf.clip_by_norm(g, .05)
        w = tf.cond(tf.placeholder_with_default(True, []), lambda: clipped(w), lambda: w * 1.)
        w.set_shape([6, 1])
        assert verdict(tf.reduce_mean(tf.matmul(x, w)), x).startswith('not proven: ')
    finally:
        if not was_v2:
            tf.disable_control_flow_v2()


def test_of_several_losses_each_offset_counts():
    x = losses.make_inputs(['x'])['x']
    parts = [tf.reduce_sum(x), tf.reduce_sum(x) + losses.variable('d', [])]
    analysis = analysed(parts, x)
    norms = find_batch_norms(analysis, tf.get_default_graph().get_operations())
    question = MEAN_OF_TOWERS._replace(adds_shards=True)
    assert verdict_of(parts[:1], analysis, norms, question).is_proven
    assert not verdict_of(parts, analysis, norms, question).is_proven


def pixels():
    """Losses of pixels [n, height, width], by valid convolutions of images that are larger."""
    image = tf.placeholder(tf.float32, [None, None, None, 3])
    labels = tf.placeholder(tf.int64, [None, None, None])
    logits = tf.nn.conv2d(image, tf.get_variable('w', [3, 3, 3, 4]), 1, 'VALID')
    return image, labels, logits


def test_lengths_that_are_not_static_are_equal_where_an_operation_needs_it():
    image, labels, logits = pixels()
    flat = tf.reshape(logits, [-1, 4])
    of_pixels = losses.cross_entropies(tf.reshape(labels, [-1]), flat)
    assert verdict(tf.reduce_mean(of_pixels), (image, labels)).startswith('proven: ')
    back = tf.reshape(of_pixels, tf.shape(labels))
    assert verdict(tf.reduce_mean(tf.reduce_max(back, [1, 2])), (image, labels)).startswith(
        'proven: ')
    assert verdict(tf.reduce_mean(tf.reduce_max(back, 0)), (image, labels)).startswith(
        'not proven: ')


def test_lengths_that_are_not_static_do_not_tell_the_order_of_entries():
    image, labels, logits = pixels()
    by_row = tf.reshape(tf.transpose(labels, [1, 0, 2]), [-1])
    of_pixels = losses.cross_entropies(by_row, tf.reshape(logits, [-1, 4]))
    assert verdict(tf.reduce_mean(of_pixels), (image, labels)).startswith('not proven: ')
    halves = tf.reshape(logits, tf.stack([2, -1, 4]))
    assert verdict(tf.reduce_mean(halves[0] * halves[1]), (image, labels)).startswith(
        'not proven: ')


@pytest.mark.parametrize('reshaped, beginning', [
    (lambda x, w: tf.reshape(x[:, 1:], [-1, 2]), 'not proven: '),  # pairs, if L - 1 is even
    (lambda x, w: tf.reshape(x[:, 1:, None] * w, [-1, 2]), 'proven: '),
    (lambda x, w: tf.reshape(x[:, 1:, None] * w, [-1, 4]), 'proven: '),
    (lambda x, w: tf.reshape(x[:, 1:, None] * w, tf.stack([losses.size(x), -1])), 'proven: ')])
def test_a_reshape_is_of_whole_examples_for_all_lengths(reshaped, beginning):
    x, w = tf.placeholder(tf.float32, [None, None]), losses.variable('w', [4])
    assert verdict(tf.reduce_mean(tf.reduce_max(reshaped(x, w), 1)), x).startswith(beginning)


@pytest.mark.parametrize('loss_of', [
    lambda x, k: tf.reduce_max(x, k),  # over the examples, if both lengths are equal
    lambda x, k: tf.reduce_max(tf.reshape(x, tf.stack([-1, k + 4])), 1)])
def test_a_difference_of_lengths_is_no_static_number(loss_of):
    x = tf.placeholder(tf.float32, [None, 4])
    p, q, r = [tf.placeholder(tf.float32, [None, None]) for _ in range(3)]
    k = tf.shape(p)[1] - tf.shape(r)[1]
    loss = tf.reduce_mean(loss_of(x, k)) + tf.reduce_mean(p * q)
    assert verdict(loss, (x, p, q, r)).startswith('not proven: ')


def test_a_length_is_no_static_number():
    x, p = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, None])
    loss = tf.reduce_mean(tf.reduce_max(x, tf.shape(p)[1] - 4))  # over the examples, if it is 4
    assert verdict(loss, (x, p)).startswith('not proven: ')


def test_a_proof_says_what_it_supposes_of_a_shape():
    x = tf.placeholder(tf.float32, [None, None])
    columns = tf.reduce_max(tf.reshape(x, [-1, 5, 1], name='columns'), 1)
    assert verdict(tf.reduce_mean(columns), x).startswith(
        "proven, if 'columns' takes 5 numbers of each example (with a static shape this condition falls away): ")
    rows = tf.reshape(tf.transpose(x), [-1, 5, 1])
    assert verdict(tf.reduce_mean(tf.reduce_max(rows, 1)), x).startswith('not proven: ')
