"""`tf.layers` on TensorFlow 2.16 and later: what is missing is said, and what is said helps."""

import os
import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from towers import compat

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VERSION = '%d.%d' % compat.TF_VERSION
HAS_LAYERS = compat.TF_VERSION < (2, 16)
ADVICE = ("pip install 'tf-keras==%s.*' (the extra tf-layers-%s), and set the environment "
          'variable TF_USE_LEGACY_KERAS=1 before the program first uses them or tf.keras.'
          % (VERSION, VERSION))


@pytest.mark.skipif(HAS_LAYERS or samples.HAS_RNN_CELLS, reason='TensorFlow has tf.layers here')
@pytest.mark.parametrize('layer', [lambda x: tf.layers.dense(x, 3),
                                   lambda x: tf.nn.rnn_cell.LSTMCell(3)])
def test_the_error_says_what_to_do(layer):
    with pytest.raises(towers.MissingPackageError) as caught:
        towers.build_towers(lambda x: tf.reduce_mean(layer(x)), np.ones([4, 2], 'float32'),
                            samples.sgd(), 2)
    assert str(caught.value) == (
        'tf.layers and tf.nn.rnn_cell are those of the package tf-keras on TensorFlow %s, which is '
        'not in use: %s' % (VERSION, ADVICE))
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize('error', [AttributeError("'Tensor' object has no attribute 'foo'"),
                                   ImportError('No module named foo')])
def test_other_errors_stay_what_they_are(error):
    def model_fn(unused_x):
        raise error
    with pytest.raises(type(error)) as caught:
        towers.build_towers(model_fn, np.ones([4, 2], 'float32'), samples.sgd(), 2)
    assert caught.value is error


def test_the_variable_without_the_package():
    assert 'which is not installed: ' + ADVICE in compat.missing_layers(
        ImportError('Keras cannot be imported. Check that it is installed.'))


def test_there_is_an_extra_for_each_version_that_needs_one():
    with open(os.path.join(ROOT, 'setup.py')) as opened:
        text = opened.read()
    limit = int(re.search(r'tensorflow>=2\.15,<2\.(\d+)', text).group(1))
    namespace = {}
    exec(text[text.index('TF_LAYERS = '):text.index('setup(\n')], namespace)
    assert namespace['TF_LAYERS'] == {
        'tf-layers-2.%d' % minor: ['tf-keras==2.%d.*' % minor, 'tensorflow==2.%d.*' % minor]
        for minor in range(16, limit)}
