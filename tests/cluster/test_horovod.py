"""What Horovod is asked for, by a stand-in for it: of two processes, the other has one example.
Where Horovod is installed, its processes, too."""

import os
import subprocess
import sys
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import horovod
from towers.graph.graph_walk import step_operations

OTHER = 'of rank 1, ü'.encode('utf-8')


@pytest.fixture
def asked(monkeypatch):
    """[(operation, name or None)] of the reductions, which leave gradients as they are given."""
    asked = []

    def allreduce(tensor, op, name=None):
        asked.append((op, name))
        return tensor + 1 if name == 'towers_examples' else tensor

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


@pytest.mark.parametrize('uneven, reduction, given, operations', [
    (False, 'mean', 4., [('average', None)] * 2), (False, 'sum', 4., [('sum', None)] * 2),
    (True, 'mean', 3., [('sum', 'towers_examples')] + [('sum', None)] * 2),
    (True, 'sum', 6., [('sum', 'towers_examples')] + [('sum', None)] * 2)])
def test_gradients_are_weighted_by_examples(uneven, reduction, given, operations, asked):
    """3 of 4 examples are here: the mean is 3/4 of this gradient and 1/4 of the other's."""
    cluster = towers.Cluster('horovod', uneven=uneven)
    v, rows = [tf.get_variable(name, [2], initializer=tf.zeros_initializer()) for name in 'vr']
    machines = cluster.machines(3, reduction, 1)
    combined = machines.combine([
        (tf.constant([4., 4.]), v),
        (tf.IndexedSlices(tf.constant([4.]), tf.constant([1]), tf.constant([2])), rows)])
    assert [variable for _, variable in combined] == [v, rows] and asked == operations
    with tf.Session() as session:
        dense, sparse = session.run([gradient for gradient, _ in combined])
    assert dense.tolist() == [given, given]
    assert sparse.values.tolist() == [given] and sparse.indices.tolist() == [1]
    assert machines.counted(3) == 6 and machines.same_examples == (None if uneven else 3)
    assert machines.updates_here


def test_each_row_is_sent_once_and_those_of_all_are_added(asked, monkeypatch):
    """Rows 1, 0, 1 are here; the stand-in gathers rows 1 and 0 of the other process."""
    rows = tf.get_variable('rows', [2], initializer=tf.zeros_initializer())
    sent = []

    def allreduce(slices, op):
        sent.append(slices)
        return tf.IndexedSlices(tf.concat([slices.values, [10., 20.]], 0),
                                tf.concat([slices.indices, [1, 0]], 0))
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce', allreduce)
    [(gradient, _)] = towers.Cluster('horovod').machines(3, 'sum', 1).combine([(
        tf.IndexedSlices(tf.constant([1., 2., 4.]), tf.constant([1, 0, 1])), rows)])
    with tf.Session() as session:
        own, together = session.run([sent[0], gradient])
    assert (own.indices.tolist(), own.values.tolist()) == ([1, 0], [5., 2.])
    assert (together.indices.tolist(), together.values.tolist()) == ([1, 0], [15., 22.])


def test_gradients_are_named_by_their_variables(asked, monkeypatch):
    """Horovod names what it adds up by the tensor: that of an operation that one worker has more of
    than another would be another gradient's there."""
    sent = []
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce',
                        lambda gradient, op: sent.append(gradient) or gradient)
    v, rows = [tf.get_variable(name, [2]) for name in ('net/v', 'net/rows')]
    with tf.name_scope('worker_1'):  # one worker's alone
        towers.Cluster('horovod').machines(3, 'sum', 1).combine([
            (tf.constant([4., 4.]), v),
            (tf.IndexedSlices(tf.constant([4.]), tf.constant([1]), tf.constant([2])), rows)])
    names = [tensor.op.name.rpartition('/')[0]
             for tensor in (sent[0], sent[1].values, sent[1].indices)]
    assert names == ['towers_shared/sums/net/' + name for name in ('v', 'rows', 'rows')]


def test_the_step_without_data_raises_after_all_reductions(asked, monkeypatch):
    """The stand-in has no data of another process here."""
    monkeypatch.setattr(sys.modules['horovod.tensorflow'], 'allreduce',
                        lambda tensor, op, name=None: tensor)
    weight = tf.get_variable('w', [], initializer=tf.zeros_initializer())
    active, gradient = tf.placeholder(tf.float32, []), tf.constant(2.) + 0.
    machines = towers.Cluster('horovod', active=active).machines(3, 'mean', 1)
    [(combined, _)] = machines.combine([(gradient, weight)])
    [ended] = machines.gates
    assert gradient.op in step_operations([ended])
    with tf.Session() as session:
        assert session.run(combined, {active: 1.}) == 2.
        for fetched in (combined, ended):
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetched, {active: 0.})


def test_texts_of_all_processes(asked):
    assert horovod.gathered_lines('of rank 0') == ['of rank 0', OTHER.decode('utf-8')]


def test_the_session_sees_the_gpu_of_its_rank(asked):
    config = towers.Cluster('horovod').session_config(tf.ConfigProto())
    assert config.gpu_options.visible_device_list == '1'


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


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(HOROVODRUN), reason='Horovod is not installed')
@pytest.mark.parametrize('workers, arguments', [
    (2, "2, 3, 'sum'"), (2, "2, 3, shares=(1, 2), accumulate=2"),
    (3, "2, 2, shares=(1, 3, 2)")])
def test_processes_of_horovod_are_one_device(workers, arguments):
    done = subprocess.run(
        [HOROVODRUN, '-np', str(workers), sys.executable, '-c', PROGRAM % arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert done.stdout.count(b'equal: True') == workers, done.stdout.decode()
