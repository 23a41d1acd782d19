"""Data sets of a user's own: what is wrong with them is said before the run, or by the batch."""

import pytest
import tensorflow.compat.v1 as tf

import datasets
import image_files
import pages
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
        lambda number: (tf.zeros([4, 8, 8, 1]), tf.fill([4], number))).skip(first_example // 4)
counted = change(num_classes=100, train_batches=numbered)
def no_argument(): return GOOD
def raises(data_dir): raise KeyError('no such flower')
def exits(data_dir): raise SystemExit(3)
def boo(**unused): raise RuntimeError('boo')
def rotten(images):
    raise ValueError('file rotten')

number = change(num_examples=20)
classes = change(num_classes='three')
no_function = change(train_batches=None)
other_arguments = change(train_batches=lambda batch_size: None)
train_raises = change(train_batches=boo)
eval_raises = change(eval_batches=boo)
channels = change(train_batches=lambda **unused: batches([4, 8, 8, 2]))
sevens = change(train_batches=lambda **unused: batches([7, 8, 8, 1]))
pairs = change(train_batches=lambda **unused: batches([4, 8, 8, 1]).map(
    lambda images, labels: (images, labels[:2])))
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
half = changed(lambda images, labels: (tf.cast(images + .25, tf.float16), labels))
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
    ('number', "m:number says of num_examples 20: expected a dict such as {'train': 3320, 'test': "
               '350}, how many examples each has.'),
    ('classes', "m:classes says of num_classes 'three': expected a whole number of at least 1."),
    ('no_function', 'train_batches of m:no_function is None: expected a function that takes the '
                    'arguments batch_size, seed, image_size, channels, first_example by name.')])
def test_what_the_function_returns_is_looked_at_first(own, name, text):
    assert error_of(lambda: own(name)) == text


@pytest.mark.slow
def test_workers_take_batches_by_turns_from_the_first_example_on(own):
    arguments = dict(ARGUMENTS, seed=1)
    assert [labels[0] for _, labels in image_files.batches(own('counted').train_batches(
        first_example=8, share=(1, 3), **arguments), 3)] == [3, 6, 9]  # of 2, 3, 4, 5, …
    assert 'makes its batches itself' in error_of(
        lambda: own('counted').train_batches(remainder='drop', **arguments))
    assert 'Cannot import the module' in error_of(
        lambda: datasets.get_dataset('no_such_module_of_a_test:gone'))


@pytest.mark.slow
def test_functions_of_other_arguments_and_images_of_other_precision(own):
    assert error_of(lambda: own('other_arguments')).endswith(
        ': expected a function that takes the arguments batch_size, seed, image_size, channels, '
        'first_example by name.')
    images, _ = tf.data.get_output_types(own('half').train_batches(seed=1, **ARGUMENTS))
    assert images == tf.float32


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
    ('channels', 'train_batches of m:channels gives images of 2 channels: expected the 1 of its '
                 'argument channels.'),
    ('sevens', 'train_batches of m:sevens gives parts of 7 examples in a batch: expected the 4 of '
               'its argument batch_size in each.'),
    ('two_labels', 'train_batches of m:two_labels gives parts of 2 and 4 examples in a batch: '
                   'expected the 4 of its argument batch_size in each.'),
    ('one_hot', 'train_batches of m:one_hot gives elements of the shapes ((4, 8, 8, 1), (4, 3)): '
                'expected (images [batch, height, width, channels], labels [batch]), a label the '
                'number of a class; from output_shapes of from_generator, or from set_shape in a '
                'map.'),
    ('int32', 'train_batches of m:int32 gives elements of the types float32 and int32: expected '
              'float32 images and int64 labels: tf.cast them, and divide images of whole numbers '
              'by their white.')])
def test_batches_of_another_shape_or_type(own, name, text):
    assert error_of(lambda: own(name).train_batches(seed=1, **ARGUMENTS),
                    datasets.OwnDataError) == text


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


@pytest.mark.parametrize('size, text', [
    (None, 'eval_batches of m:short_part gives a batch of 3 examples in one part: expected 4 in '
           'each'),
    (4, 'train_batches of m:short_part gives a batch of 3 examples in one part: expected 4 in '
        'each, its argument batch_size, from drop_remainder=True')])
def test_a_part_of_another_number_of_examples(own, size, text):
    with tf.Session() as session:
        batches = (own('short_part').eval_batches(batch_size=4) if size is None
                   else own('short_part').train_batches(batch_size=size, seed=1))
        following = tf.data.make_one_shot_iterator(batches).get_next()
        assert text in error_of(lambda: session.run(following), tf.errors.InvalidArgumentError)


@pytest.mark.parametrize('name, text', [
    ('four_parts', 'train_batches of m:four_parts gives elements of 4 parts: expected (features, '
                   'labels), or features alone; put several into a dict.'),
    ('single', 'train_batches of m:single gives elements of the shapes ')])
def test_elements_that_are_no_features_and_labels(own, name, text):
    assert error_of(lambda: own(name).train_batches(batch_size=4, seed=1),
                    datasets.OwnDataError).startswith(text)


@pytest.mark.parametrize('name', ['dict_features', 'ragged'])
def test_elements_that_are_no_pair_of_tensors(own, name):
    assert error_of(lambda: own(name).train_batches(seed=1, **ARGUMENTS),
                    datasets.OwnDataError) == (
        'train_batches of m:%s gives elements of another structure than (Tensor, Tensor), the '
        'images and the labels, both dense: end it with a .map() that returns these two.' % name)


@pytest.mark.parametrize('name, text', [
    ('label', 'train_batches of m:label gives the label 8: expected 0 to 2'),
    pytest.param(
        'two_images', 'train_batches of m:two_images gives a batch of 2 examples in one part: '
        'expected 4 in each, its argument batch_size, from drop_remainder=True',
        marks=pytest.mark.slow),
    pytest.param(
        'eval_empty', 'eval_batches of m:eval_empty gives a batch of 0 examples: expected none '
        'without examples', marks=pytest.mark.slow),
    ('more', 'eval_batches of m:more gives 8 examples or more, and its num_examples says 4 for '
             'test: correct that, or end the pipeline by .take(4)')])
@pytest.mark.slow
def test_a_batch_that_is_not_what_it_has_to_be(own, name, text):
    dataset = own(name)
    batches = (dataset.eval_batches(**ARGUMENTS) if name.startswith(('eval', 'more')) else
               dataset.train_batches(seed=1, **ARGUMENTS))
    batch = tf.data.make_one_shot_iterator(batches).get_next()
    with tf.Session() as session:
        found = error_of(lambda: [session.run(batch) for _ in range(2)],
                         tf.errors.InvalidArgumentError)
    assert 'assertion failed: [%s]' % text in found


def test_images_of_an_unknown_shape(own):
    assert 'gives elements of the shapes' in error_of(
        lambda: own('generated').train_batches(seed=1, **ARGUMENTS), datasets.OwnDataError)


def test_test_images_of_another_size(own):
    found = own('other_size')
    found.train_batches(seed=1, **ARGUMENTS)
    assert error_of(lambda: found.eval_batches(**ARGUMENTS), datasets.OwnDataError) == (
        'eval_batches of m:other_size gives images of 10 x 8 pixels, and train_batches of '
        'm:other_size of 8 x 8: expected one size.')


@pytest.mark.slow
def test_the_example_of_the_docs_is_what_it_has_to_be(tmp_path, monkeypatch):
    source = pages.blocks('docs/data.md', 'python')[0].lines
    assert 'def squares(data_dir):' in source
    (tmp_path / 'squares.py').write_text('\n'.join(source))
    monkeypatch.chdir(tmp_path)
    found = datasets.get_dataset('squares:squares')
    place = tf.placeholder_with_default(tf.constant(0, tf.int64), [])
    iterator = tf.data.make_initializable_iterator(found.train_batches(
        batch_size=32, seed=1, image_size=8, channels=1, first_example=place))
    batch, labels = iterator.get_next(), []
    with tf.Session() as session:
        for first in (0, 64, 96):
            session.run(iterator.initializer, {place: first})
            labels.append([session.run(batch)[1].tolist() for _ in range(4)])
    assert labels[0][2:] == labels[1][:2] and labels[0][:3] == labels[2][:3]
    assert sorted(sum(labels[0][:3], [])) == [0] * 32 + [1] * 32 + [2] * 32
    tests = image_files.batches(found.eval_batches(batch_size=10, image_size=8, channels=1))
    assert [len(each) for _, each in tests] == [10, 10, 4]


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
