"""Data sets of a user's own: what is wrong with them is said before the run, or by the batch."""

import sys
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
import image_files
from models import classifier, registry
from towers.errors import InvalidArgumentError

ARGUMENTS = dict(batch_size=4, image_size=8, channels=1)


def batches(shape, label=1):
    return tf.data.Dataset.from_tensors((tf.zeros(shape), tf.fill(shape[:1], tf.constant(
        label, tf.int64)))).repeat()


def train(batch_size, seed, image_size, channels, first_example):
    return batches([batch_size, image_size, image_size, channels])


def batches_to_test(batch_size, image_size, channels):
    return batches([batch_size, image_size, image_size, channels]).take(1)


GOOD = dict(num_classes=3, num_examples=dict(train=8, test=4), train_batches=train,
            eval_batches=batches_to_test)


@pytest.fixture
def own(monkeypatch):
    """Function that makes the data set m:f, of a function or of changes of a good one."""
    module = types.ModuleType('m')
    monkeypatch.setitem(sys.modules, 'm', module)

    def made(function=None, **changes):
        module.f = function or (lambda data_dir: dict(GOOD, **changes))
        return datasets.get_dataset('m:f')
    return made


def error_of(function, kind=InvalidArgumentError):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def raises(error):
    def function(data_dir=None, **unused):
        raise error
    return function


def test_a_name_is_a_module_and_a_function():
    for name in (':', ':f', '.own:f', 'own:'):
        assert error_of(lambda: datasets.get_dataset(name)) == (
            '--dataset=%s: expected module:function, such as flowers:batches for the function '
            'batches of flowers.py.' % name)


@pytest.mark.parametrize('options, text', [
    (dict(function=lambda: GOOD), 'm:f cannot be called with one argument: expected a function of '
                                  'data_dir, the folder of --data_dir or None.'),
    (dict(function=3), "The module m has no function 'f', which --dataset=m:f names."),
    (dict(function=lambda data_dir: None), 'm:f returned None: expected a dict with num_examples, '
                                           'train_batches, eval_batches.'),
    (dict(num_examples=20), "num_examples of m:f=20 of type int: expected a dict such as {'train': "
                            "3320, 'test': 350}, how many examples each has."),
    (dict(image_shape=3), 'image_shape of m:f=3 of type int: expected height, width and channels, '
                          'such as (32, 32, 3).'),
    (dict(image_shape=(8, 8)), 'image_shape of m:f=(8, 8): expected height, width and channels, '
                               'such as (32, 32, 3).'),
    (dict(image_shape=(8, 8, 0)), 'image_shape of m:f=0: expected a whole number of at least 1.'),
    (dict(train_batches=None), 'train_batches of m:f is None: expected a function that takes the '
     'arguments batch_size, seed, image_size, channels, first_example by name.')])
def test_what_the_function_returns_is_looked_at_first(own, options, text):
    assert error_of(lambda: own(**options)) == text


def test_what_the_users_code_raises_names_the_data_set(own):
    for call, text in (
            (lambda: own(raises(KeyError('no such flower'))),
             "--dataset=m:f: f raised KeyError: 'no such flower'"),
            (lambda: own(train_batches=raises(RuntimeError('boo'))).train_batches(
                seed=1, **ARGUMENTS), '--dataset=m:f: train_batches raised RuntimeError: boo'),
            (lambda: own(eval_batches=raises(RuntimeError('boo'))).eval_batches(**ARGUMENTS),
             '--dataset=m:f: eval_batches raised RuntimeError: boo')):
        assert error_of(call, datasets.OwnDataError) == text


@pytest.mark.parametrize('source, text', [
    ('def f(:', 'SyntaxError: '), ('import sys; sys.exit(3)', 'SystemExit: 3'),
    ('f = 3', None), (None, None)])
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, source, text):
    name = 'broken_module_of_a_test_%d' % len(source or '')
    if source:
        (tmp_path / (name + '.py')).write_text(source)
    monkeypatch.chdir(tmp_path)
    found = error_of(lambda: datasets.get_dataset(name + ':f'),
                     datasets.OwnDataError if text else InvalidArgumentError)
    assert found.startswith(
        '--dataset=%s:f: the module %s raised %s' % (name, name, text) if text else
        'The module %s has no' % name if source else 'Cannot import the module of --dataset=')


@pytest.mark.slow
def test_workers_take_batches_by_turns_from_the_first_example_on(own):
    def numbered(first_example, **unused):
        return tf.data.Dataset.range(100).map(
            lambda number: (tf.zeros([4, 8, 8, 1], tf.float16), tf.fill([4], number))).skip(
                first_example // 4)
    counted, arguments = own(num_classes=100, train_batches=numbered), dict(ARGUMENTS, seed=1)
    found = image_files.batches(counted.train_batches(first_example=8, share=(1, 3), **arguments),
                                3)
    assert [labels[0] for _, labels in found] == [3, 6, 9]  # of 2, 3, 4, 5, …
    assert found[0][0].dtype == np.float32
    assert 'makes its batches itself' in error_of(
        lambda: counted.train_batches(remainder='drop', **arguments))


@pytest.mark.parametrize('change, text', [
    (lambda images, labels: (images, tf.one_hot(labels, 3, dtype=tf.int64)),
     'shapes ((4, 8, 8, 1), (4, 3)) and the types float32 and int64'),
    (lambda images, labels: ({'image': images}, labels),
     'shapes ({image: (4, 8, 8, 1)}, (4,)) and the types float32 and int64'),
    (lambda images, labels: tf.py_func(lambda *given: given, [images, labels],
                                       [tf.float32, tf.int64]), 'shapes (')])
def test_elements_that_are_no_images_and_classes(own, change, text):
    found = error_of(lambda: own(train_batches=lambda **unused: batches([4, 8, 8, 1]).map(
        change)).train_batches(seed=1, **ARGUMENTS), datasets.OwnDataError)
    assert found.startswith('train_batches of m:f gives elements of the ' + text)
    assert found.endswith(
        ': expected images of a floating-point type [batch, height, width, 1], and their classes, '
        'int64 [batch]; end it with a .map() that returns these two, with set_shape or '
        'output_shapes where shapes are unknown.')


@pytest.mark.slow
def test_batches_of_another_size(own):
    assert error_of(lambda: own(train_batches=lambda **unused: batches([7, 8, 8, 1])).train_batches(
        seed=1, **ARGUMENTS), datasets.OwnDataError) == (
            'train_batches of m:f gives batches of the shapes ((7, 8, 8, 1), (7,)): expected 4 '
            'examples in each, its argument batch_size.')
    found = own(eval_batches=lambda **unused: batches([4, 10, 8, 1]).take(1))
    found.train_batches(seed=1, **ARGUMENTS)
    assert error_of(lambda: found.eval_batches(**ARGUMENTS), datasets.OwnDataError) == (
        'eval_batches of m:f gives images of 10 x 8 pixels, and the other function of 8 x 8: '
        'expected one size.')


def of_any_structure(own, change):
    """The data set of features of several kinds and a dict of labels."""
    def given(batch_size=4, seed=None, first_example=0):
        features = {'words': tf.constant([[1, 0], [2, 3]] * 2), 'text': tf.constant(['a'] * 4),
                    'sparse': tf.SparseTensor([[0, 1], [3, 0]], [1., 2.], [4, 3])}
        return tf.data.Dataset.from_tensors((features, {'one': tf.zeros([4, 2])})).map(change)
    return own(num_classes=None, train_batches=given, eval_batches=given)


@pytest.mark.slow
@pytest.mark.parametrize('change', [lambda features, labels: (features, labels),
                                    lambda features, labels: features])
def test_features_of_any_structure_for_a_model_of_ones_own(own, change):
    found = of_any_structure(own, change).train_batches(batch_size=4, seed=1)
    (batch,) = image_files.batches(found)
    features = batch if isinstance(batch, dict) else batch[0]
    assert features['words'].tolist() == [[1, 0], [2, 3], [1, 0], [2, 3]]
    assert features['text'].tolist() == [b'a'] * 4
    assert features['sparse'].dense_shape.tolist() == [4, 3]
    if features is not batch:
        assert tf.data.get_output_shapes(found)[1]['one'].as_list() == [4, 2]


def test_ragged_features_are_refused(own):
    def change(features, labels):
        return dict(features, words=tf.RaggedTensor.from_tensor(features['words'])), labels
    assert error_of(lambda: of_any_structure(own, change).train_batches(batch_size=4, seed=1),
                    datasets.OwnDataError).startswith(
        'train_batches of m:f gives a ragged tensor, which cannot be cut by examples: expected ')


@pytest.mark.slow
def test_colours_for_a_network_that_takes_any(own):
    def coloured(batch_size, **unused):
        return batches([batch_size, 8, 8, 3])
    found = own(train_batches=coloured)
    assert found.image_shape == (None, None, None)
    assert error_of(lambda: found.train_batches(seed=1, **ARGUMENTS), datasets.OwnDataError) == (
        "train_batches of m:f gives images of 3 channels, and the network asks for 1 (the argument "
        "channels): give these, or add 'image_shape': (height, width, 3) to the dict, for a "
        'network that takes any number, such as digits.')
    found = own(train_batches=coloured, image_shape=(8, 8, np.int64(3)))
    digits = classifier.Classifier(registry.get_network('digits'), 3, image_shape=found.image_shape)
    assert digits.image_format == {'image_size': 8, 'channels': 3}
    found.train_batches(batch_size=4, seed=1, **digits.image_format)


@pytest.mark.parametrize('change, text', [
    (lambda features, labels: (features, labels, labels, labels), '({'),
    (lambda features, labels: ({'text': features['text'][0]}, labels),
     '({text: ()}, {one: (4, 2)}): expected batches of (features, labels), or of features alone, '
     '[batch, …] each, from ')])
def test_elements_that_are_no_features_and_labels(own, change, text):
    assert error_of(lambda: of_any_structure(own, change).train_batches(batch_size=4, seed=1),
                    datasets.OwnDataError).startswith(
        'train_batches of m:f gives elements of the shapes ' + text)


def three(features, labels):
    return dict(features, text=tf.py_func(
        lambda: np.array(['a'] * 3, object), [], tf.string)), labels


@pytest.mark.slow
@pytest.mark.parametrize('split, change, text', [
    ('train', dict(train_batches=lambda **unused: batches([4, 8, 8, 1], 8)),
     'gives the label 8: expected 0 to 2'),
    ('train', three, 'gives a batch of 4, 3, 4, 4 examples by its parts: expected 4 in each, its '
     'argument batch_size, from drop_remainder=True'),
    ('eval', three, 'gives a batch of 4, 3, 4, 4 examples by its parts: expected as many in each, '
     'and at least one'),
    ('eval', dict(eval_batches=lambda **unused: batches([4, 8, 8, 1]).take(2).filter(
        lambda images, labels: tf.equal(labels[0], 1))),
     'gives 8 examples or more, and its num_examples says 4 for test: correct that, or end the '
     'pipeline by .take(4)')])
def test_a_batch_that_is_not_what_it_has_to_be(own, split, change, text):
    dataset = of_any_structure(own, change) if callable(change) else own(**change)
    found = (dataset.eval_batches(**ARGUMENTS) if split == 'eval' else
             dataset.train_batches(seed=1, **ARGUMENTS))
    assert 'assertion failed: [%s_batches of m:f %s]' % (split, text) in error_of(
        lambda: image_files.batches(found, 2), tf.errors.InvalidArgumentError)


def test_batches_of_another_graph(own):
    """TensorFlow said so in a traceback, without the name of the data set."""
    with tf.Graph().as_default():
        kept = batches([4, 8, 8, 1])
    for split, arguments in (('train', dict(ARGUMENTS, seed=1)), ('eval', ARGUMENTS)):
        name = split + '_batches'
        found = own(**{name: lambda **unused: kept})
        assert error_of(lambda: getattr(found, name)(**arguments), datasets.OwnDataError) == (
            '%s of m:f returned a tf.data.Dataset of another graph: expected one that it makes '
            'each time it is called, without a tf.Graph() of its own.' % name)
