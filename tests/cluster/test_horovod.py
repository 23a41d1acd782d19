"""What Horovod is asked for, by a stand-in for it: of two processes, the other has one example."""

import sys
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import horovod

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


def test_texts_of_all_processes(asked):
    assert horovod.gathered_lines('of rank 0') == ['of rank 0', OTHER.decode('utf-8')]


def test_the_session_sees_the_gpu_of_its_rank(asked):
    config = towers.Cluster('horovod').session_config(tf.ConfigProto())
    assert config.gpu_options.visible_device_list == '1'
