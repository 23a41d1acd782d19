"""Data sets of a user's own: what is wrong with them is said before the run, or by the batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
import image_files
from towers.errors import InvalidArgumentError

MODULE = '''
import numpy as np
import tensorflow.compat.v1 as tf

def batches(shape, label=1):
    return tf.data.Dataset.from_tensors((tf.zeros(shape), tf.fill(shape[:1], tf.constant(
        label, tf.int64)))).repeat()

def train(batch_size, seed, image_size, channels, first_example):
    return batches([batch_size, image_size, image_size, channels])

def test(batch_size, image_size, channels):
    return batches([batch_size, image_size, image_size, channels]).take(1)

GOOD = dict(num_classes=3, num_examples=dict(train=8, test=4), train_batches=train,
            eval_batches=test)

def change(**changes):
    return lambda data_dir: dict(GOOD, **changes)

def numbered(first_example, **unused):
    return tf.data.Dataset.range(100).map(
        lambda number: (tf.zeros([4, 8, 8, 1], tf.float16), tf.fill([4], number))).skip(
            first_example // 4)
counted = change(num_classes=100, train_batches=numbered)
def no_argument(): return GOOD
def raises(data_dir): raise KeyError('no such flower')
def exits(data_dir): raise SystemExit(3)
def boo(**unused): raise RuntimeError('boo')

number = change(num_examples=20)
classes = change(num_classes='three')
no_function = change(train_batches=None)
train_raises = change(train_batches=boo)
eval_raises = change(eval_batches=boo)
channels = change(train_batches=lambda **unused: batches([4, 8, 8, 2]))
sevens = change(train_batches=lambda **unused: batches([7, 8, 8, 1]))
label = change(train_batches=lambda **unused: batches([4, 8, 8, 1], 8))
one_hot = change(train_batches=lambda **unused: batches([4, 8, 8, 1]).map(
    lambda images, labels: (images, tf.one_hot(labels, 3, dtype=tf.int64))))
def changed(function):
    return change(train_batches=lambda **unused: batches([4, 8, 8, 1]).map(function))

KEPT = []
def in_another_graph(**unused):
    with tf.Graph().as_default():
        return batches([4, 8, 8, 1])
def kept(**unused):
    KEPT.append(batches([4, 8, 8, 1]))
    return KEPT[0]

other_graph = change(train_batches=in_another_graph)
other_graph_test = change(eval_batches=in_another_graph)
made_once = change(train_batches=kept)

dict_features = changed(lambda images, labels: ({'image': images}, labels))
three = changed(lambda images, labels: (images, labels, labels))
ragged = changed(lambda images, labels: (tf.RaggedTensor.from_tensor(images), labels))
int32 = changed(lambda images, labels: (images, tf.cast(labels, tf.int32)))
two_labels = changed(lambda images, labels: (images, labels[:2]))
unknown = lambda value, of, dtype: tf.py_func(lambda each: each[:of], [value], dtype)
two_images = changed(lambda images, labels: (tf.ensure_shape(
    unknown(images, 2, tf.float32), [None, 8, 8, 1]), labels))
eval_empty = change(eval_batches=lambda **unused: batches([4, 8, 8, 1]).take(1).concatenate(
    batches([4, 8, 8, 1]).take(1).map(lambda images, labels: (images[:0], labels[:0]))))
other_size = change(eval_batches=lambda **unused: batches([4, 10, 8, 1]).take(1))
generated = change(train_batches=lambda **unused: tf.data.Dataset.from_generator(
    lambda: [], (tf.float32, tf.int64)))
more = change(eval_batches=lambda **unused: batches([4, 8, 8, 1]).take(2).filter(
    lambda images, labels: tf.equal(labels[0], 1)))
not_callable = 3
def none(data_dir): pass

def of_any_structure(change=lambda *batch: batch):
    def given(batch_size=4, seed=None, first_example=0):
        features = {'words': tf.ragged.constant([[1], [2, 3]] * 2), 'text': tf.constant(['a'] * 4),
                    'sparse': tf.SparseTensor([[0, 1], [3, 0]], [1., 2.], [4, 3])}
        return tf.data.Dataset.from_tensors((features, {'one': tf.zeros([4, 2])})).map(change)
    return lambda data_dir: dict(num_examples=dict(train=8, test=4), train_batches=given,
                                 eval_batches=given)
structure = of_any_structure()
alone = of_any_structure(lambda features, labels: features)
short_part = of_any_structure(lambda features, labels: (
    dict(features, text=tf.py_func(lambda: np.array(['a'] * 3, object), [], tf.string)), labels))
eval_short_part = short_part
four_parts = of_any_structure(lambda features, labels: (features, labels, labels, labels))
single = of_any_structure(lambda features, labels: ({'text': features['text'][0]}, labels))
'''
ARGUMENTS = dict(batch_size=4, image_size=8, channels=1)
NAME = 'own_module_of_a_test'


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / (NAME + '.py')).write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return lambda function: datasets.get_dataset('%s:%s' % (NAME, function))


def error_of(function, kind=InvalidArgumentError):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value).replace(NAME, 'm')


@pytest.mark.parametrize('name', [':', ':f', '.own:f', 'own:'])
def test_a_name_is_a_module_and_a_function(name):
    assert error_of(lambda: datasets.get_dataset(name)) == (
        '--dataset=%s: expected module:function, such as flowers:batches for the function batches '
        'of flowers.py.' % name)


@pytest.mark.parametrize('name, text', [
    ('no_argument', 'm:no_argument cannot be called with one argument: expected a function of '
                    'data_dir, the folder of --data_dir or None.'),
    ('not_callable', "The module m has no function 'not_callable', which --dataset=m:not_callable "
                     'names.'),
    ('number', "num_examples of m:number=20 of type int: expected a dict such as {'train': 3320, "
               "'test': 350}, how many examples each has."),
    ('classes', "num_classes of m:classes='three': expected a whole number of at least 1."),
    ('no_function', 'train_batches of m:no_function is None: expected a function that takes the '
                    'arguments batch_size, seed, image_size, channels, first_example by name.'),
    ('none', 'm:none returned None: expected a dict with num_examples, train_batches, '
             'eval_batches.')])
def test_what_the_function_returns_is_looked_at_first(own, name, text):
    assert error_of(lambda: own(name)) == text


@pytest.mark.slow
def test_workers_take_batches_by_turns_from_the_first_example_on(own):
    arguments = dict(ARGUMENTS, seed=1)
    found = image_files.batches(own('counted').train_batches(
        first_example=8, share=(1, 3), **arguments), 3)
    assert [labels[0] for _, labels in found] == [3, 6, 9]  # of 2, 3, 4, 5, …
    assert found[0][0].dtype == np.float32
    assert 'makes its batches itself' in error_of(
        lambda: own('counted').train_batches(remainder='drop', **arguments))
    assert 'Cannot import the module' in error_of(
        lambda: datasets.get_dataset('no_such_module_of_a_test:gone'))


def test_what_the_users_code_raises_names_the_data_set(own):
    for call, text in (
            (lambda: own('raises'), "--dataset=m:raises: raises raised KeyError: 'no such flower'"),
            (lambda: own('exits'), '--dataset=m:exits: exits raised SystemExit: 3'),
            (lambda: own('train_raises').train_batches(seed=1, **ARGUMENTS),
             '--dataset=m:train_raises: train_batches raised RuntimeError: boo'),
            (lambda: own('eval_raises').eval_batches(**ARGUMENTS),
             '--dataset=m:eval_raises: eval_batches raised RuntimeError: boo')):
        assert error_of(call, datasets.OwnDataError) == text


@pytest.mark.parametrize('source, text', [
    ('def f(:', 'SyntaxError: '), ('import sys; sys.exit(3)', 'SystemExit: 3')])
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, source, text):
    name = 'broken_module_of_a_test'
    (tmp_path / (name + '.py')).write_text(source)
    monkeypatch.chdir(tmp_path)
    found = error_of(lambda: datasets.get_dataset(name + ':f'), datasets.OwnDataError)
    assert found.startswith('--dataset=%s:f: the module %s raised %s' % (name, name, text))


@pytest.mark.parametrize('name, text', [
    ('channels', 'shapes ((4, 8, 8, 2), (4,)) and the types float32 and int64'),
    ('one_hot', 'shapes ((4, 8, 8, 1), (4, 3)) and the types float32 and int64'),
    ('int32', 'shapes ((4, 8, 8, 1), (4,)) and the types float32 and int32'),
    ('dict_features', "shapes ({image: (4, 8, 8, 1)}, (4,)) and the types float32 and int64"),
    ('ragged', 'shapes ('), ('three', 'shapes ((4, 8, 8, 1), (4,), (4,)) and'),
    ('generated', 'shapes (')])
def test_elements_that_are_no_images_and_classes(own, name, text):
    found = error_of(lambda: own(name).train_batches(seed=1, **ARGUMENTS), datasets.OwnDataError)
    assert found.startswith('train_batches of m:%s gives elements of the %s' % (name, text))
    assert found.endswith(
        ': expected images of a floating-point type [batch, height, width, 1], and their classes, '
        'int64 [batch]; end it with a .map() that returns these two, with set_shape or '
        'output_shapes where shapes are unknown.')


@pytest.mark.parametrize('name, shapes', [('sevens', '((7, 8, 8, 1), (7,))'),
                                          ('two_labels', '((4, 8, 8, 1), (2,))')])
def test_batches_of_another_size(own, name, shapes):
    assert error_of(lambda: own(name).train_batches(seed=1, **ARGUMENTS),
                    datasets.OwnDataError) == (
        'train_batches of m:%s gives batches of the shapes %s: expected 4 examples in each, its '
        'argument batch_size.' % (name, shapes))


def test_features_of_any_structure_for_a_model_of_ones_own(own):
    with tf.Session() as session:
        for name in ('structure', 'alone'):
            batch = session.run(tf.data.make_one_shot_iterator(own(name).train_batches(
                batch_size=4, seed=1)).get_next())
            features = batch if name == 'alone' else batch[0]
            assert features['words'].to_list() == [[1], [2, 3], [1], [2, 3]]
            assert features['text'].tolist() == [b'a'] * 4
            assert features['sparse'].dense_shape.tolist() == [4, 3]
    shapes = tf.data.get_output_shapes(own('structure').train_batches(batch_size=4, seed=1))
    assert shapes[1]['one'].as_list() == [4, 2]


@pytest.mark.parametrize('name, text', [
    ('four_parts', '({'), ('single', '({text: ()}, {one: (4, 2)}): expected batches of (features, '
                                     'labels), or of features alone, [batch, …] each, from ')])
def test_elements_that_are_no_features_and_labels(own, name, text):
    assert error_of(lambda: own(name).train_batches(batch_size=4, seed=1),
                    datasets.OwnDataError).startswith(
        'train_batches of m:%s gives elements of the shapes %s' % (name, text))


@pytest.mark.slow
@pytest.mark.parametrize('name, text', [
    ('label', 'train_batches of m:label gives the label 8: expected 0 to 2'),
    ('two_images', 'train_batches of m:two_images gives a batch of 2, 4 examples by its parts: '
     'expected 4 in each, its argument batch_size, from drop_remainder=True'),
    ('short_part', 'train_batches of m:short_part gives a batch of 4, 3, 4, 4 examples by its '
     'parts: expected 4 in each, its argument batch_size, from drop_remainder=True'),
    ('eval_short_part', 'eval_batches of m:eval_short_part gives a batch of 4, 3, 4, 4 examples by '
     'its parts: expected as many in each, and at least one'),
    ('eval_empty', 'eval_batches of m:eval_empty gives a batch of 0, 0 examples by its parts: '
     'expected as many in each, and at least one'),
    ('more', 'eval_batches of m:more gives 8 examples or more, and its num_examples says 4 for '
             'test: correct that, or end the pipeline by .take(4)')])
def test_a_batch_that_is_not_what_it_has_to_be(own, name, text):
    dataset = own(name)
    batches = (dataset.eval_batches(**ARGUMENTS) if name.startswith(('eval', 'more')) else
               dataset.train_batches(seed=1, **ARGUMENTS))
    batch = tf.data.make_one_shot_iterator(batches).get_next()
    with tf.Session() as session:
        found = error_of(lambda: [session.run(batch) for _ in range(2)],
                         tf.errors.InvalidArgumentError)
    assert 'assertion failed: [%s]' % text in found


def test_test_images_of_another_size(own):
    found = own('other_size')
    found.train_batches(seed=1, **ARGUMENTS)
    assert error_of(lambda: found.eval_batches(**ARGUMENTS), datasets.OwnDataError) == (
        'eval_batches of m:other_size gives images of 10 x 8 pixels, and the other function of 8 x '
        '8: expected one size.')


def test_batches_of_another_graph(own):
    """TensorFlow said so in a traceback, without the name of the data set."""
    text = (' returned a tf.data.Dataset of another graph: expected one that it makes each time it '
            'is called, without a tf.Graph() of its own.')
    assert error_of(lambda: own('other_graph').train_batches(seed=1, **ARGUMENTS),
                    datasets.OwnDataError) == 'train_batches of m:other_graph' + text
    assert error_of(lambda: own('other_graph_test').eval_batches(**ARGUMENTS),
                    datasets.OwnDataError) == 'eval_batches of m:other_graph_test' + text
    own('made_once').train_batches(seed=1, **ARGUMENTS)
    with tf.Graph().as_default():
        assert error_of(lambda: own('made_once').train_batches(seed=1, **ARGUMENTS),
                        datasets.OwnDataError) == 'train_batches of m:made_once' + text
