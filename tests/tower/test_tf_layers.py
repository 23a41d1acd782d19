"""`tf.layers` on TensorFlow 2.16 and later: what is missing is said, and what is said helps."""

import glob
import os
import re
import shutil
import subprocess
import sys

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
                                   ImportError('No module named foo'), RecursionError()])
def test_other_errors_stay_what_they_are(error):
    def model_fn(unused_x):
        raise error
    with pytest.raises(type(error)) as caught:
        towers.build_towers(model_fn, np.ones([4, 2], 'float32'), samples.sgd(), 2)
    assert caught.value is error


@pytest.mark.parametrize('version', ['2.15', '2.16', '2.21'])
def test_the_variable_without_the_package(monkeypatch, version):
    monkeypatch.setattr(compat, 'TF_VERSION', tuple(map(int, version.split('.'))))
    text = compat.missing_layers(
        ImportError('Keras cannot be imported. Check that it is installed.'))
    assert 'which is not installed' in text
    if version == '2.15':
        assert 'Take the variable out of the environment: TensorFlow 2.15 has tf.layers' in text
    else:
        assert "pip install 'tf-keras==%s.*' (the extra tf-layers-%s), " % (
            version, version) in text


def test_there_is_an_extra_for_each_version_that_needs_one():
    with open(os.path.join(ROOT, 'setup.py')) as opened:
        text = opened.read()
    limit = int(re.search(r'tensorflow>=2\.15,<2\.(\d+)', text).group(1))
    namespace = {}
    exec(text[text.index('TF_LAYERS = '):text.index('setup(\n')], namespace)
    assert namespace['TF_LAYERS'] == {
        'tf-layers-2.%d' % minor: ['tf-keras==2.%d.*' % minor, 'tensorflow==2.%d.*' % minor]
        for minor in range(16, limit)}


PROGRAM = """
import numpy as np
import tensorflow.compat.v1 as tf
import towers
tf.disable_eager_execution()

def model_fn(x, y):
    h = tf.layers.batch_normalization(tf.layers.dense(x, 5, tf.nn.tanh), training=True)
    outputs, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.LSTMCell(3), h[:, None, :], dtype=tf.float64)
    return tf.reduce_mean(tf.square(outputs[:, 0] - y))

random = np.random.RandomState(1)
batch = random.rand(8, 4), random.rand(8, 3)
built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(0.1), 2, 'mean')
names = sorted(variable.op.name for variable in built.variables)
assert names[0].startswith('batch_normalization/') and 'dense/kernel' in names, names
assert len(built.towers[0].updates) == 2, built.towers[0].updates
with tf.Session(config=towers.session_config(built.devices)) as session:
    session.run(tf.global_variables_initializer())
    losses = [session.run([built.loss, built.train_op])[0] for _ in range(20)]
assert losses[-1] < losses[0], losses
print('TRAINED', tf.__version__)
"""


@pytest.mark.slow
@pytest.mark.skipif(HAS_LAYERS, reason='TensorFlow has tf.layers here')
def test_in_a_fresh_environment_the_advice_is_enough(tmp_path):
    """The extra and the variable, and TensorFlow stays the one that is installed."""
    subprocess.check_call([sys.executable, '-m', 'venv', str(tmp_path / 'venv')])
    python = str(tmp_path / 'venv' / 'bin' / 'python')
    (site,) = glob.glob(str(tmp_path / 'venv' / 'lib' / 'python*' / 'site-packages'))
    # TensorFlow is that of this environment, so that it need not be fetched again.
    with open(os.path.join(site, 'tensorflow_of_the_tests.pth'), 'w') as opened:
        opened.write(os.path.dirname(os.path.dirname(tf.__file__)).split('/tensorflow/')[0] + '\n')
    environment = {name: value for name, value in os.environ.items()
                   if name not in ('TF_USE_LEGACY_KERAS', 'PYTHONPATH')}
    environment.update(TF_CPP_MIN_LOG_LEVEL='3', PIP_DISABLE_PIP_VERSION_CHECK='1')
    pip = [python, '-m', 'pip', '--quiet']
    reachable = subprocess.call(
        pip + ['download', '--no-deps', '--dest', str(tmp_path / 'wheels'),
               'tf-keras==%s.*' % VERSION], env=environment)
    if reachable:
        pytest.skip('no package index can be reached')

    def run(**variables):
        done = subprocess.run([python, '-c', PROGRAM], cwd=str(tmp_path), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True,
                              env=dict(environment, **variables))
        return done.stdout + done.stderr
    source = tmp_path / 'source'  # building leaves things behind
    source.mkdir()
    for name in ('setup.py', 'README.md'):
        shutil.copy(os.path.join(ROOT, name), str(source))
    shutil.copytree(os.path.join(ROOT, 'towers'), str(source / 'towers'))
    subprocess.check_call(pip + ['install', str(source)], env=environment)
    assert ADVICE in run()
    subprocess.check_call(pip + ['install', '%s[tf-layers-%s]' % (source, VERSION)],
                          env=environment)
    assert not os.path.exists(os.path.join(site, 'tensorflow'))
    assert ADVICE in run()  # the variable is needed, too
    assert 'TRAINED %s\n' % tf.version.VERSION in run(TF_USE_LEGACY_KERAS='1')
