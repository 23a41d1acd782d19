"""What every test gets: a graph of its own, the repository on the path, `--only`; and runs of
train.py, for those that ask for them."""

import collections
import os
import re
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


LEAVES_OUT = {  # by what --only says: a condition of what goes, and what the end says of it
    'fast': (lambda marks: 'slow' in marks, '%d slow %s left out: make test-all'),
    'slow': (lambda marks: 'slow' not in marks, '%d fast %s left out: make test'),
    'versions': (lambda marks: 'slow' in marks and 'version_independent' in marks,
                 '%d slow %s left out, the same on every version: make test-all')}


def pytest_addoption(parser):
    parser.addoption('--only', choices=sorted(LEAVES_OUT), help=(
        'fast: without tests marked slow; slow: those alone; versions: without the slow ones that '
        'are the same on every version of TensorFlow. Without it, all'))


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: takes more than some seconds; `make test` leaves it '
                                       'out, `make test-all` does not')
    config.addinivalue_line('markers', 'version_independent: nothing of it changes with the '
                                       'version of TensorFlow; where it is slow it runs on one')
    config.addinivalue_line('markers', 'fast_only(pattern): of its cases, those whose id the '
                                       'regular expression finds nothing in are slow')
    # pytest-xdist's own, which may not be installed.
    config.addinivalue_line('markers', 'xdist_group(name): its tests run in one process, for what '
                                       'is made once a process')
    # TF's own use of gast on Python 3.13 warns some hundred times; nothing here can mend it.
    config.addinivalue_line('filterwarnings', 'ignore::DeprecationWarning:gast.*')
    config.left_out = 0


def pytest_itemcollected(item):
    """Marks the slow cases of a test of which some are fast; tests that share what takes long to
    make share one process of pytest-xdist's, too."""
    for mark in item.iter_markers('fast_only'):
        if not re.search(mark.args[0], item.callspec.id):
            item.add_marker(pytest.mark.slow)
    shared = [name for name in ('reference', 'runner', 'start_writer') if name in item.fixturenames]
    if shared:
        item.add_marker(pytest.mark.xdist_group(shared[0]))


def mark_every_other_kind(items):
    """Of two cases that differ in the kind of variables alone, one is slow: by turns each kind."""
    cases = collections.OrderedDict()  # each process of pytest-xdist has to come to the same
    for item in items:
        values = dict(getattr(getattr(item, 'callspec', None), 'params', {}))
        kinds = [values.pop(name) for name in KINDS_OF_VARIABLES if name in values]
        if len(kinds) == 1 and item.get_closest_marker('slow') is None:
            of_both = item.nodeid.partition('[')[0], tuple(
                (name, id(values[name])) for name in sorted(values))
            cases.setdefault(of_both, {})[kinds[0] in (True, 'resource')] = item
    turns = collections.Counter()
    for (name, _), pair in cases.items():
        if len(pair) == 2:
            file = name.partition('::')[0]
            pair[bool(turns[file] % 2)].add_marker(pytest.mark.slow)
            turns[file] += 1


# Parameters and fixtures of two values each, reference and resource variables.
KINDS_OF_VARIABLES = ('kind_of_variables', 'use_resource', 'resource')


@pytest.hookimpl(trylast=True)  # after -k and -m: what they left out is not counted
def pytest_collection_modifyitems(config, items):
    mark_every_other_kind(items)
    if config.getoption('--only'):
        goes, _ = LEAVES_OUT[config.getoption('--only')]
        left_out = [item for item in items if goes({mark.name for mark in item.iter_markers()})]
        config.left_out = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if hasattr(config, 'workerinput'):  # long ones first, so that no process waits at the end
        items.sort(key=lambda item: item.get_closest_marker('slow') is None)


def pytest_sessionfinish(session):
    if hasattr(session.config, 'workeroutput'):  # a process of pytest-xdist
        session.config.workeroutput['left_out'] = session.config.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Each process collects all tests, and the one that prints collects none."""
    node.config.left_out = getattr(node, 'workeroutput', {}).get('left_out', node.config.left_out)


def pytest_terminal_summary(terminalreporter, config):
    if config.left_out:
        _, text = LEAVES_OUT[config.getoption('--only')]
        terminalreporter.write_line(
            text % (config.left_out, 'test' if config.left_out == 1 else 'tests'))


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
