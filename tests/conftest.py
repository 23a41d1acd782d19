"""What every test gets: a graph of its own, the repository on the path, `--skip-slow`; and runs of
train.py, for those that ask for them."""

import os
import sys

# TensorFlow reads it when it is imported; it leaves errors on and turns build advice off.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# So that plain `pytest` finds models/ and datasets/, which are not installed, as `python -m` does.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import pytest  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import train_runs  # noqa: E402


def pytest_addoption(parser):
    parser.addoption('--skip-slow', action='store_true', help='leave out tests marked slow')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: takes more than some seconds; --skip-slow skips it')
    # TF's own use of gast on Python 3.13 warns some hundred times; nothing here can mend it.
    config.addinivalue_line('filterwarnings', 'ignore::DeprecationWarning:gast.*')


def pytest_collection_modifyitems(config, items):
    if config.getoption('--skip-slow'):
        for item in items:
            if item.get_closest_marker('slow'):
                item.add_marker(pytest.mark.skip(reason='--skip-slow was given'))


@pytest.fixture(autouse=True)
def graph():
    """A fresh default graph, in graph mode under TF 2 too; a test may take it by this name."""
    with tf.Graph().as_default() as fresh:
        yield fresh


@pytest.fixture(scope='session')
def runner(tmp_path_factory):
    """What starts runs of train.py; see `train_runs.Runner`."""
    runner = train_runs.Runner(tmp_path_factory.mktemp('runner') / 'stderr')
    yield runner
    runner.process.stdin.close()
    runner.process.wait()


@pytest.fixture(scope='session')
def reference(runner, tmp_path_factory):
    """The run with `train_runs.FLAGS`, never interrupted. Tests leave its folder as it is."""
    folder = tmp_path_factory.mktemp('reference') / 'run'
    return runner.run(folder, train_runs.FLAGS + ['--save_steps=3',
                                                  '--export_dir=%s/export' % folder])
