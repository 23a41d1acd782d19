"""What Horovod is asked for, by a stand-in for it: of two processes, the other has one example.
Where Horovod is installed, its processes, too."""

import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from cluster_runs import ROOT, own_program, weights_of_own_program
import towers
from towers.graph.graph_walk import step_operations

OTHER = 'of rank 1, ü'.encode('utf-8')
NUMBERS = 'towers_numbers'  # what each step adds up first


@pytest.fixture
def asked(monkeypatch):
    """[(operation, name or None)] of the reductions, which leave gradients as they are given."""
    asked = []

    def allreduce(tensor, op, name=None):
        asked.append((op, name))
        return tensor + 1. if name == NUMBERS else tensor  # the other process has one example

    def allgather(tensor, name):
        others = [len(OTHER)] if name == 'towers_sizes' else list(OTHER)
        return tf.concat([tensor, tf.constant(others, tensor.dtype)], 0)
    hvd = types.ModuleType('horovod.tensorflow')
    hvd.__dict__.update(init=lambda: None, size=lambda: 2, rank=lambda: 0, local_size=lambda: 2,
                        local_rank=lambda: 1, Sum='sum', Average='average', allreduce=allreduce,
                        allgather=allgather)
    package = types.ModuleType('horovod')
    package.tensorflow = hvd
    monkeypatch.setitem(sys.modules, 'horovod', package)
    monkeypatch.setitem(sys.modules, 'horovod.tensorflow', hvd)
    return asked


@pytest.mark.parametrize('uneven, reduction, weight', [
    (False, 'mean', .5), (True, 'mean', .75), (True, 'sum', 1.5)])
def test_losses_are_weighted_by_examples_and_gradients_are_added(uneven, reduction, weight, asked):
    """3 of 4 examples are here: the mean is 3/4 of this loss and 1/4 of the other's."""
    step = towers.Cluster('horovod', uneven=uneven).begin_step(3, reduction)
    v, rows = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in 'vr']
    machines = step.combine([
        (tf.constant([4., 4.]), v),
        (tf.IndexedSlices(tf.constant([4.]), tf.constant([1]), tf.constant([2])), rows)], None)
    combined = machines.gradients
    assert [variable for _, variable in combined] == [v, rows]
    assert asked == [('sum', NUMBERS)] * uneven + [('sum', None)] * 2
    with tf.Session() as session:
        with pytest.raises(tf.errors.FailedPreconditionError, match='session_begun'):
            session.run(combined[0][0])  # worker 0's values are not here
        machines.begin_session(session)
        dense, sparse = session.run([gradient for gradient, _ in combined])
        assert session.run(tf.convert_to_tensor(step.loss_weight)) == weight
    assert dense.tolist() == [4., 4.]
    assert sparse.values.tolist() == [4.] and sparse.indices.tolist() == [1]
    assert machines.same_examples == (None if uneven else 3)
    assert machines.updates_here


@pytest.mark.parametrize('size, sent_indices, sent_values', [
    (2, [1, 0], [5., 2.]), (3, [1, 0, 1], [1., 2., 4.])])
def test_rows_of_all_are_added_and_one_row_is_sent_once_where_it_is_likely_twice(
        size, sent_indices, sent_values, asked, monkeypatch):
    """Rows 1, 0, 1 are here; the stand-in gathers rows 1 and 0 of the other process."""
    rows = tf.get_variable('rows', [size], initializer=tf.zeros_initializer())
    sent = []

    def allreduce(slices, op, name=None):
        sent.append(slices)
        return tf.IndexedSlices(tf.concat([slices.values, [10., 20.]], 0),
                                tf.concat([slices.indices, [1, 0]], 0))
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce', allreduce)
    machines = towers.Cluster('horovod').begin_step(3, 'sum').combine([(
        tf.IndexedSlices(tf.constant([1., 2., 4.]), tf.constant([1, 0, 1])), rows)], None)
    [(gradient, _)] = machines.gradients
    with tf.Session() as session:
        machines.begin_session(session)
        own, together = session.run([sent[0], gradient])
    assert (own.indices.tolist(), own.values.tolist()) == (sent_indices, sent_values)
    assert (together.indices.tolist(), together.values.tolist()) == ([1, 0], [15., 22.])


def test_the_step_without_data_raises_after_all_reductions(asked, monkeypatch):
    """The stand-in has no data of another process here."""
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce',
                        lambda tensor, op, name=None: tensor)
    weight = tf.get_variable('w', [], initializer=tf.zeros_initializer())
    active, gradient = tf.placeholder(tf.float32, []), tf.constant(2.) + 0.
    machines = towers.Cluster('horovod', active=active).begin_step(3, 'mean').combine(
        [(gradient, weight)], None)
    [(combined, _)] = machines.gradients
    [ended] = machines.conditions
    assert gradient.op in step_operations([ended])
    with tf.Session() as session:
        machines.begin_session(session)
        assert session.run(combined, {active: 1.}) == 2.
        for fetched in (combined, ended):
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetched, {active: 0.})


def test_a_message_of_constants_is_sent_in_each_step(asked, monkeypatch):
    """Of two alike, each is sent. TensorFlow computes what is constant and without state when it
    prepares a step, and it does not compute the same thing twice."""
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce',
                        lambda tensor, op, name=None: tf.negative(tensor, name=name or 'message'))
    step = towers.Cluster('horovod', uneven=True).begin_step(3, 'sum')
    values = [step.workers.sum(tf.constant([1, 2])) for _ in range(2)]
    pairs = [(tf.constant([4., 4.]), tf.get_variable(name, [2])) for name in 'vw']
    machines = step.combine(pairs, None)
    gradients = [gradient for gradient, _ in machines.gradients]
    metadata = tf.RunMetadata()
    with tf.Session() as session:
        machines.begin_session(session)
        session.run([values, gradients, tf.convert_to_tensor(step.loss_weight)],
                    options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    sent = [node.name for graph in metadata.partition_graphs for node in graph.node
            if node.op == 'Neg']
    assert sorted(sent) == [
        'towers_shared/sums/v/message', 'towers_shared/sums/w/message',
        'towers_shared/towers_numbers', 'towers_value', 'towers_value_1']


def test_what_horovod_says_itself_is_refused(asked):
    for given in (dict(rank=1), dict(workers=['a:1', 'b:2'])):
        with pytest.raises(towers.errors.InvalidArgumentError, match='its launcher says both'):
            towers.Cluster('horovod', **given)
    assert towers.Cluster('horovod')._replace(uneven=True).workers == (None, None)


def test_a_mean_of_float16_is_that_of_float32(asked):
    """Two gradients of 40,000 have a sum that float16 has not."""
    cluster, v = towers.Cluster('horovod'), tf.get_variable('v', [2], tf.float16)
    machines = cluster.begin_step(3, 'mean').combine(
        [(tf.constant([4e4, 4e4], tf.float16), v)], None)
    [(combined, _)] = machines.gradients
    [reduced] = [op for op in tf.get_default_graph().get_operations()
                 if op.type == 'Cast' and op.outputs[0].dtype == tf.float16]
    assert reduced.inputs[0].dtype == tf.float32 and combined.dtype == tf.float16


def test_the_session_sees_the_gpu_of_its_rank_and_leaves_the_processors_to_others(asked):
    config = towers.Cluster('horovod').session_config(tf.ConfigProto())
    assert config.gpu_options.visible_device_list == '1'
    assert config.experimental.disable_thread_spinning


def test_the_first_session_of_a_process_has_the_threads_of_the_sessions_to_come(asked, monkeypatch):
    """TensorFlow gives all sessions of a process the threads that the first one asks for. The
    processes meet by it; the stand-in's other process never comes."""
    cluster = towers.Cluster('horovod')
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('v', [])), (tf.constant([1., 2.]),),
        tf.train.GradientDescentOptimizer(.1), reduction='mean', cluster=cluster)
    configs = []

    def session(config, make=tf.Session):
        configs.append(config)
        return make(config=config)
    monkeypatch.setattr(tf, 'Session', session)
    config = towers.session_config(built.devices, intra_op_threads=1, inter_op_threads=3)
    with pytest.raises(towers.errors.ClusterError, match='did not join'):
        with towers.join(cluster, built, config, start_timeout=.1):
            pass
    assert configs[0].intra_op_parallelism_threads == 1
    assert configs[0].inter_op_parallelism_threads == 3
    assert configs[0].device_count['GPU'] == 0  # no session before the program's has GPUs


HOROVODRUN = os.path.join(os.path.dirname(sys.executable), 'horovodrun')
PROGRAM = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
sys.path[:0] = ['tests', 'tests/inspect']
import towers
from machine_samples import sparse_and_dense
from test_check_machines import BATCH, momentum
tf.disable_v2_behavior()
report = towers.check_towers(sparse_and_dense, BATCH, momentum, %s, tolerance=1e-12,
                             cluster='horovod')
print('equal: %%s' %% (report.equal and report.compared > 12))
print(report)
"""


LOADS = ('import horovod.tensorflow as hvd; hvd.init(); '
         'assert hvd.gloo_built() or hvd.mpi_built(), "neither Gloo nor MPI"')


@pytest.fixture(scope='module')
def horovodrun():
    """Runs a program by two or more processes of Horovod; without it the test is skipped, as with
    one that is installed and not built for this TensorFlow, or for no way to start processes."""
    if not os.path.exists(HOROVODRUN):
        pytest.skip('Horovod is not installed')
    loads = subprocess.run([sys.executable, '-c', LOADS], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=100)
    if loads.returncode:
        pytest.skip('Horovod cannot be used: %s' % (
            loads.stdout.decode(errors='replace').strip() or '?').splitlines()[-1])

    def run(workers, program):
        return subprocess.run(
            [HOROVODRUN, '-np', str(workers), sys.executable] + program, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=300,
            env=dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL='3'))
    return run


@pytest.mark.slow
@pytest.mark.parametrize('arguments', [
    "2, 3, 'sum'", '2, 3, shares=(1, 2), memory=towers.Memory(2)'])
def test_processes_of_horovod_are_one_device(arguments, horovodrun):
    done = horovodrun(2, ['-c', PROGRAM % arguments])
    assert done.stdout.count(b'equal: True') == 2, done.stdout.decode()


WHOLE_BATCH = """
import sys
import tensorflow.compat.v1 as tf
sys.path[:0] = ['tests', 'tests/whole_batch']
import towers
from sample_models import momentum
from test_workers import DATA, contrastive_loss, fused, masked_loss, normalized_twice
tf.disable_v2_behavior()
for model_fn in (contrastive_loss, masked_loss, normalized_twice, fused):
    report = towers.check_towers(
        model_fn, DATA[model_fn], momentum, 2, 3, 'mean', shares=(2, 1), cluster='horovod',
        batch_norm='sync', tolerance=2e-5 if model_fn is fused else 1e-12)
    print('equal: %s' % (report.equal and report.compared > 4))
    print(report)
"""


@pytest.mark.slow
def test_values_of_the_whole_batch_are_those_of_all_processes(horovodrun):
    done = horovodrun(2, ['-c', WHOLE_BATCH])
    assert done.stdout.count(b'equal: True') == 8, done.stdout.decode()


UNTIL_ALL_END = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
sys.path[:0] = ['tests', 'tests/whole_batch']
import towers
from test_workers import (
    DATA, contrastive_loss, fused, masked_loss, normalized_twice, on_one_device, until_all_end)
tf.disable_v2_behavior()
cluster = towers.Cluster('horovod')
for model_fn in (contrastive_loss, masked_loss, normalized_twice, fused):
    values, last = until_all_end(cluster, model_fn, [[4], [2, 3]], batch_norm='sync')
    for rows in ([0, 1, 2, 3, 4, 5], [6, 7, 8]):
        values = on_one_device(model_fn, values, [part[rows] for part in DATA[model_fn]], 1)
    tolerance = 2e-5 if model_fn is fused else 1e-12
    for name in sorted(values):
        is_trained = 'Momentum' in name or name + '/Momentum' in values
        if is_trained or cluster.rank == 1:  # averages of a worker without data stay
            np.testing.assert_allclose(last[name], values[name], tolerance, tolerance, err_msg=name)
    print('equal: %s, %d variables' % (model_fn.__name__, len(values)))
"""


@pytest.mark.slow
def test_a_process_without_data_has_no_part_in_the_batch(horovodrun):
    """Rank 1 has two batches more than rank 0."""
    done = horovodrun(2, ['-c', UNTIL_ALL_END])
    assert done.stdout.count(b'equal: ') == 8, done.stdout.decode()


AT_END = """
import os, signal
class Told(tf.train.SessionRunHook):
    def after_run(self, run_context, run_values):
        if cluster.rank == 1 and run_context.session.run(step) == 30:
            os.kill(os.getpid(), signal.SIGTERM)
_end = towers.StopTogetherHook.end
def end(self, session):
    _end(self, session)
    print('\\nended: %d' % session.run(step), self.stopped_by, flush=True)
towers.StopTogetherHook.end = end
"""


@pytest.mark.slow
@pytest.mark.parametrize('steps, is_told', [(40, False), (4000, True)])
def test_all_processes_of_horovod_stop_after_the_same_step(steps, is_told, horovodrun, tmp_path):
    """The chief alone counts the steps of the program of the docs; and with a signal to worker 1,
    all have its status, and the chief has saved."""
    path = own_program(str(tmp_path), steps, kind='horovod')
    with open(path) as opened:
        text = opened.read().replace('stop = towers.', AT_END + 'stop = towers.')
    if is_told:
        text = text.replace('[Steps(), stop]', '[Steps(), Told(), stop]')
    with open(path, 'w') as opened:
        opened.write(text)
    done = horovodrun(2, [path])
    output = done.stdout.decode(errors='replace')
    [(first, why), other] = re.findall(r'ended: (\d+) (.*)', output)
    assert (first, why) == other, output
    last = int(first)
    if is_told:
        assert 30 <= last <= 32 and why == '(1, 15)', output
        assert done.returncode and 'Exit code: 143' in output, output
    else:
        assert (last, why, done.returncode) == (40, '(None, None)', 0), output
    newest = tf.train.latest_checkpoint(str(tmp_path / 'run'))
    assert newest.endswith('-%d' % last), output
    np.testing.assert_allclose(tf.train.load_checkpoint(newest).get_tensor('weights'),
                               weights_of_own_program(last), rtol=0, atol=1e-5)


SLOW = """images += tf.py_func(lambda: np.float32(time.sleep(.5) or 0), [], tf.float32)
    images -= towers.batch_mean(tf.reduce_mean(images, 0))"""
KILLED = """
import os, signal, threading, time
class Killed(tf.train.SessionRunHook):
    def before_run(self, run_context):
        if cluster.rank == 1 and run_context.session.run(step) == 3:
            threading.Timer(.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize('lost, why', [
    (1, 'its process has ended, or its machine cut'), (0, 'it has ended its training')])
def test_a_process_of_horovod_that_ends_alone_is_named_in_one_line(lost, why, tmp_path, horovodrun):
    """Worker 1 is killed in a forward pass with a value of the whole batch; or the chief alone
    counts the steps, and says no stop."""
    path = own_program(str(tmp_path), 20, kind='horovod')
    changes = [('last_hooks=[stop]', 'last_hooks=[]'), (', stop]', ']')] if lost == 0 else [
        ('stop = towers', KILLED + 'stop = towers'), ('    weights', '    %s\n    weights' % SLOW),
        ('[Steps(), stop]', '[Steps(), Killed(), stop]')]
    with open(path) as opened:
        text = opened.read().replace('join(cluster, built)', 'join(cluster, built, dead_after=5.)')
    for former, new in changes:
        assert former in text
        text = text.replace(former, new, 1)
    with open(path, 'w') as opened:
        opened.write(text)
    done = horovodrun(2, [path])
    assert done.returncode, done.stdout.decode(errors='replace')
    assert b'own.py: worker %d is lost: %s' % (lost, why.encode()) in done.stdout
