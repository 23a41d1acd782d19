"""towers.split_batch: which example goes to which tower, at what weight, and what is refused."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import session_config, split_batch
from towers.errors import InputError, InvalidArgumentError

Batch = collections.namedtuple('Batch', 'images labels')


def numbers(count, width=2):
    """[[0, 1], [2, 3], ...]: example i starts with 2 i."""
    return np.arange(count * width, dtype=np.float32).reshape([count, width])


def run(fetches, feed=None):
    with tf.Session(config=session_config(2)) as session:
        return session.run(fetches, feed)


def firsts(shards, feed=None):
    """The first column of each shard, which tells its examples."""
    return [value[:, 0].tolist() for value in run(shards.inputs, feed)]


def known(tensor):
    return tensor.shape.as_list()


# ---- a static batch -----------------------------------------------------------------------------

def test_even_shards_in_order(graph):
    batch = tf.constant(numbers(6))
    with tf.device('/gpu:1'):
        shards = split_batch(batch, 3)
    assert firsts(shards) == [[0., 2.], [4., 6.], [8., 10.]]
    assert shards.sizes == [2, 2, 2] and shards.batch_size == 6
    assert shards.weights == [1 / 3.] * 3 and shards.is_even
    assert [known(shard) for shard in shards.inputs] == [[2, 2]] * 3
    made = [op for op in graph.get_operations() if op.name.startswith('shards/')]
    assert {op.device for op in made} == {'/device:CPU:0'}  # whatever scope is around
    assert [op.type for op in made if op.type.startswith('Split')] in (['Split'], ['SplitV'])
    assert not any(op.type in ('Assert', 'StridedSlice') for op in made)


def test_ten_on_four_is_an_error_before_any_operation(graph):
    with pytest.raises(InvalidArgumentError, match="^remainder='pad': expected one of 'error', 'w"):
        split_batch(numbers(4), 2, 'pad')
    with pytest.raises(InputError) as caught:
        split_batch(numbers(10), 4)
    assert str(caught.value) == (
        "a batch of 10 does not divide among 4 towers: use a batch of 8, or remainder='weight' "
        "(uneven shards, weighted by their size) or remainder='drop' (leave 2 out).")
    assert not graph.get_operations()


@pytest.mark.parametrize('count, remainder, expected, sizes, size', [
    (10, 'weight', [[0., 2., 4.], [6., 8., 10.], [12., 14.], [16., 18.]], [3, 3, 2, 2], None),
    (10, 'drop', [[0., 2.], [4., 6.], [8., 10.], [12., 14.]], [2] * 4, 2),
    # The last two hold the first example, which is real and so cannot be NaN, and count nothing.
    (2, 'weight', [[0.], [2.], [0.], [0.]], [1, 1, 0, 0], 1)])
def test_what_four_towers_do_not_divide(count, remainder, expected, sizes, size):
    shards = split_batch(tf.constant(numbers(count)), 4, remainder)
    assert firsts(shards) == expected and shards.sizes == sizes
    assert shards.batch_size == sum(sizes) and shards.is_even == (remainder == 'drop')
    assert shards.weights == [each / float(sum(sizes)) for each in sizes]
    # One graph is imported for all towers, so it knows no size that differs.
    assert [known(shard)[0] for shard in shards.inputs] == [size] * 4


def test_no_example_for_any_tower():
    for size, remainder, least in (0, 'error', 1), (0, 'weight', 1), (3, 'drop', 4):
        with pytest.raises(InputError, match=(
                '^a batch of %d is too small for 4 towers: pass a batch of at least %d.$' % (
                    size, least))):
            split_batch(numbers(size), 4, remainder)


# ---- a batch of any size ------------------------------------------------------------------------

@pytest.fixture
def batch():
    return tf.placeholder(tf.float32, [None, 2], name='batch')


@pytest.mark.parametrize('remainder, size, expected, sizes', [
    ('error', 4, [[0.], [2.], [4.], [6.]], [1] * 4),
    ('weight', 10, [[0., 2., 4.], [6., 8., 10.], [12., 14.], [16., 18.]], [3, 3, 2, 2]),
    ('weight', 2, [[0.], [2.], [0.], [0.]], [1, 1, 0, 0])])
def test_a_dynamic_batch(batch, remainder, size, expected, sizes):
    shards, feed = split_batch(batch, 4, remainder), {batch: numbers(size)}
    assert [known(shard) for shard in shards.inputs] == [[None, 2]] * 4
    assert firsts(shards, feed) == expected
    assert run(shards.sizes + [shards.batch_size], feed) == sizes + [size]
    # With 'weight' they may be even, but that is no certainty.
    assert shards.is_even == (remainder == 'error')
    assert (shards.weights if shards.is_even else run(shards.weights, feed)) == [
        count / float(size) for count in sizes]


def runtime_error(shards, feed):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(shards.inputs, feed)
    return str(caught.value)


@pytest.mark.parametrize('remainder, size, said', [
    ('error', 10, 'towers: the batch does not divide among 4 towers (remainder=weight takes it, '
                  'remainder=drop if it has an example for each). Its number of examples:'),
    ('weight', 0, 'towers: a batch for 4 towers needs at least 1 examples and has'),
    ('drop', 3, 'towers: a batch for 4 towers needs at least 4 examples and has')])
def test_a_dynamic_batch_that_cannot_be_cut(batch, remainder, size, said):
    text = runtime_error(split_batch(batch, 4, remainder), {batch: numbers(size)})
    assert said in text and '[%d]' % size in text


def test_dynamic_first_dimensions_that_differ(batch):
    labels = tf.placeholder(tf.int64, [None])
    shards = split_batch({'x': batch, 'y': labels}, 2, 'weight')
    text = runtime_error(shards, {batch: numbers(4), labels: np.zeros([6], np.int64)})
    assert ('towers: the first dimensions of the inputs differ: those of inputs[x] and inputs[y] '
            'are') in text
    assert '[4]' in text and '[6]' in text


# ---- one leaf says its size, another does not ----------------------------------------------------

def test_one_known_size_is_that_of_all(batch):
    shards = split_batch((batch, tf.range(4)), 2)
    assert shards.sizes == [2, 2] and shards.batch_size == 4
    assert [known(leaf) for leaf in shards.inputs[0]] == [[2, 2], [2]]
    values = run(shards.inputs, {batch: numbers(4)})
    assert [images[:, 0].tolist() for images, _ in values] == [[0., 2.], [4., 6.]]
    assert [labels.tolist() for _, labels in values] == [[0, 1], [2, 3]]
    text = runtime_error(shards, {batch: numbers(6)})  # is checked as it runs
    assert ('towers: the first dimensions of the inputs differ: those of the others and inputs[0] '
            'are') in text and '[6]' in text


# ---- nests, types -------------------------------------------------------------------------------

def test_a_nest_of_everything():
    inputs = {
        'images': tf.constant(numbers(4)),
        'pair': (tf.constant([b'a', b'b', b'c', b'd']), [np.arange(4)]),
        'batch': Batch(tf.constant([True, False, True, False]), None)}
    shards = split_batch(inputs, 2)
    first, second = run([{'images': s['images'], 'pair': s['pair'], 'batch': s['batch'].images}
                         for s in shards.inputs])
    assert first['images'].tolist() == [[0., 1.], [2., 3.]]
    assert second['pair'][0].tolist() == [b'c', b'd']
    assert second['pair'][1][0].tolist() == [2, 3]
    assert first['batch'].tolist() == second['batch'].tolist() == [True, False]
    for shard in shards.inputs:
        assert type(shard) is dict and type(shard['pair']) is tuple
        assert type(shard['pair'][1]) is list and type(shard['batch']) is Batch
        assert shard['batch'].labels is None


# ---- sparse tensors -----------------------------------------------------------------------------

def sparse_rows(count):
    """A value 10 i + 1 in column i % 3 of row i, but none in row 1."""
    rows = [i for i in range(count) if i != 1]
    return tf.SparseTensorValue([[i, i % 3] for i in rows], [10. * i + 1 for i in rows], [count, 3])


def test_sparse_tensors_of_a_nest():
    sparse = tf.SparseTensor.from_value(sparse_rows(4))
    inputs = {'a': [numbers(4), sparse], 'b': Batch(None, (sparse,))}
    shards = split_batch(inputs, 2)
    assert all(type(each['b']) is Batch for each in shards.inputs)
    for leaves in zip(*[(each['a'][1], each['b'].labels[0]) for each in shards.inputs]):
        assert run([tf.sparse.to_dense(leaf) for leaf in leaves])[1].tolist() == [
            [0., 0., 21.], [31., 0., 0.]]
        assert leaves[0].shape.as_list() == [None, 3]  # layers need the static dimensions


def test_sparse_dynamic_with_a_remainder():
    fed = tf.sparse_placeholder(tf.float32)
    shards = split_batch((fed, tf.placeholder_with_default(np.arange(3), [None])), 2, 'weight')
    values = run([tf.sparse.to_dense(shard[0]) for shard in shards.inputs]
                 + [shard[1] for shard in shards.inputs], {fed: sparse_rows(3)})
    assert [value.tolist() for value in values] == [
        [[1., 0., 0.], [0., 0., 0.]], [[0., 0., 21.]], [0, 1], [2]]


# ---- feeding one tower by hand ------------------------------------------------------------------

def test_one_tower_fed_by_hand_leaves_the_others():
    shards = split_batch(tf.constant(numbers(4), name='pairs'), 2)
    by_hand = [[-1., -2.], [-3., -4.]]
    assert [(shard.op.type, shard.op.name) for shard in shards.inputs] == [
        ('PlaceholderWithDefault', 'shards/pairs'), ('PlaceholderWithDefault', 'shards/pairs_1')]
    values = run(shards.inputs, {shards.inputs[1]: by_hand})
    assert values[0].tolist() == [[0., 1.], [2., 3.]] and values[1].tolist() == by_hand


# ---- errors before any operation ----------------------------------------------------------------

def error_of(inputs, *args):
    graph = tf.get_default_graph()
    before = len(graph.get_operations())
    with pytest.raises(InputError) as caught:
        split_batch(inputs, *args)
    assert len(graph.get_operations()) == before
    return str(caught.value)


def test_static_first_dimensions_that_differ():
    images, labels = tf.zeros([4, 2]), tf.zeros([6])
    assert error_of((images, None, labels), 2) == (
        'the first dimensions of the inputs differ: inputs[0] has 4, inputs[2] has 6. Every tensor '
        'needs the same number of examples.')
    assert "inputs['x'] has 4, inputs['y'] has 6" in error_of({'y': labels, 'x': images}, 2)
    assert "inputs['x'] has 4, inputs['y'][0] has 6" in error_of({'y': (labels,), 'x': images}, 2)
    pair = collections.namedtuple('Pair', 'b a')
    assert "inputs[0].b has 4, inputs[1]['q'] has 6" in error_of(
        (pair(images, None), {'q': labels, 'p': None}), 2)


def foreign():
    with tf.Graph().as_default():
        return tf.zeros([4], name='foreign')


def of_itself():
    inputs = []
    inputs.append(inputs)
    return inputs


@pytest.mark.parametrize('make, text', [
    (lambda: (numbers(2), tf.constant(0.5)), 'inputs[1] is a scalar and has no batch dimension to'),
    (lambda: {'rate': 0.5, 'x': numbers(2)}, "inputs['rate'] is a scalar"),
    (lambda: (np.ones(2), [3, 4]), 'inputs[1][0] is a scalar and has no batch dimension to cut: let '
                                   'the model function take it from its closure. A placeholder of '
                                   'a finished model is no input, and fed as before'),
    (lambda: {'x': [sparse_rows(4)]}, "inputs['x'][0] is a SparseTensorValue: pass tf.SparseTens"),
    (of_itself, 'inputs contain themselves, or are nested too deeply'),
    (lambda: (None, None), 'inputs=(None, None) holds no tensor'),
    (lambda: (tf.zeros([4]), foreign()), 'inputs[1] (foreign:0) belongs to another graph than the'),
    (lambda: tf.data.Dataset.range(4), 'tensors of one batch, such as tf.data.make_one_shot_itera'),
    (lambda: tf.ragged.constant([[1, 2], [3]]), 'is a RaggedTensor, which cannot be cut'),
    (lambda: (numbers(2), object()), 'inputs[1] is a object, which cannot be made a tensor'),
    (lambda: {1: numbers(2), 'x': numbers(2)}, 'inputs cannot be taken apart')])
def test_what_cannot_be_cut_is_named_by_its_path(make, text):
    with pytest.raises(InputError) as caught:
        split_batch(make(), 2)
    assert text in str(caught.value)
