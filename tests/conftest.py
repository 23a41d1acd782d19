"""What every test gets: a graph of its own, and the repository on the path; and runs of train.py,
for those that ask for them."""

import gc
import os
import signal
import sys
import threading

# TensorFlow reads it when it is imported; it leaves errors on and turns build advice off.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# A server of TensorFlow cannot be ended, and has 64 threads for answers of others, unless this says
# otherwise: after some hundred tests a process had 16,000, half of what Linux allows to all.
os.environ.setdefault('TF_GRPC_WORKER_CACHE_QUEUES', '4')
# So that plain `pytest` finds models/ and datasets/, which are not installed, as `python -m` does.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Started by nohup, or in the background of a script, a process ignores these, and so do those that
# it starts: the tests of signals would wait for nothing.
if threading.current_thread() is threading.main_thread():
    for _number, _handler in ((signal.SIGINT, signal.default_int_handler),
                              (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(_number) is signal.SIG_IGN:
            signal.signal(_number, _handler)

import pytest  # noqa: E402

# TensorFlow is imported by what uses it: the process of pytest-xdist that prints does not.


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: takes long, or is much like another that is fast; '
                                       '`make test` leaves it out, `make test-all` does not')
    # TF's own use of gast on Python 3.13 warns some hundred times; nothing here can mend it.
    config.addinivalue_line('filterwarnings', 'ignore::DeprecationWarning:gast.*')


SHARE_RUNS = ('trainer/', 'test_docs.py', 'memory/test_measure.py')  # of train.py, see `runner`


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One process has all tests that share runs of train.py; others go to the next free one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return 'runs' if any(part in nodeid for part in SHARE_RUNS) else nodeid
    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """What one process has to do alone comes first: the other then takes all that is left."""
    items.sort(key=lambda item: not any(part in item.nodeid for part in SHARE_RUNS))


def pytest_collection_finish():
    """Modules and tests stay: to look through them for garbage takes 4 % of the time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def graph():
    """A fresh default graph, in graph mode under TF 2 too; a test may take it by this name."""
    import tensorflow.compat.v1 as tf
    before = process_switches(tf)
    with tf.Graph().as_default() as fresh:
        yield fresh
    assert process_switches(tf) == before, 'the test left a switch of TensorFlow for the next one'


def process_switches(tf):
    """What a test that sets it has to put back, as tests after it run in the same process."""
    return {'control flow v2': tf.control_flow_v2_enabled(),
            'resource variables': tf.resource_variables_enabled(),
            'eager execution': tf.executing_eagerly()}


@pytest.fixture(scope='session')
def runner(tmp_path_factory):
    """What starts runs of train.py; see `train_runs.Runner`."""
    import train_runs
    runner = train_runs.Runner(tmp_path_factory.mktemp('runner') / 'stderr')
    yield runner
    runner.process.stdin.close()
    runner.process.wait()


@pytest.fixture(scope='session')
def reference(runner, tmp_path_factory):
    """The run with `train_runs.FLAGS`, never interrupted. Tests leave its folder as it is."""
    folder = tmp_path_factory.mktemp('reference') / 'run'
    import train_runs
    return runner.run(folder, train_runs.FLAGS + ['--save_steps=3',
                                                  '--export_dir=%s/export' % folder])
