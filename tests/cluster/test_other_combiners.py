"""Optimizers that combine gradients over machines themselves go with no cluster."""

import sys

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.cluster import Cluster
from towers.cluster.other_combiners import combiner_of
from towers.errors import ClusterError
from one_process import addresses


def like(module, name, base=tf.train.Optimizer):
    """An object of a class of that name and module, around another optimizer."""
    def __init__(self, optimizer):
        tf.train.Optimizer.__init__(self, False, name)
        self._optimizer = optimizer
    return type(name, (base,), {'__module__': module, '__init__': __init__})(descent())


class Legacy(tf.train.Optimizer):
    """Somebody's own, around others, which it keeps as it likes."""

    def __init__(self, **kept):
        super().__init__(False, 'Legacy')
        self.__dict__.update(kept)


def descent():
    return tf.train.GradientDescentOptimizer(.1)


def sync():
    return tf.train.SyncReplicasOptimizer(descent(), 2, 2)


def horovods():
    return like('horovod.tensorflow', '_DistributedOptimizer')


COMBINERS = {
    'horovod': (horovods, 'is a horovod.DistributedOptimizer'),
    'byteps': (lambda: like('byteps.tensorflow', 'DistributedOptimizer'), 'is a byteps.Distr'),
    'sync': (sync, 'SyncReplicasOptimizer is a SyncReplicasOptimizer'),
    'subclass': (lambda: like('mine', 'Mine', type(sync())), 'Mine is a SyncReplicasOptimizer'),
    'attribute': (lambda: Legacy(o=horovods()), 'Legacy has a horovod.DistributedOptimizer in it'),
    'dict': (lambda: Legacy(by_name={'a': Legacy(_opt=sync())}), 'has a SyncReplicasOptimizer'),
    'made by a function': (lambda: towers.TowerOptimizer(horovods), 'has a horovod.Distr')}


@pytest.mark.parametrize('case', sorted(COMBINERS))
def test_a_combiner_is_refused_with_a_cluster(case, graph):
    make, expected = COMBINERS[case]
    with pytest.raises(ClusterError, match='^the optimizer [^ ]* ?' + expected) as raised:
        towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), tf.ones([2]),
                            make(), 1, 'mean', cluster=Cluster('ring', workers=addresses(2)))
    assert 'Give build_towers the optimizer that it wraps' in str(raised.value)
    assert tf.global_variables() == []


def test_what_combines_nothing_is_taken(graph):
    """Also where optimizers have each other, or an attribute that fails."""
    one, other = Legacy(), Legacy()
    one.inner, other.inner = other, one
    other.rate, other.slots = tf.constant(.1), {1: [2], 'kind': tf.train.SyncReplicasOptimizer}
    for optimizer in (one, towers.TowerOptimizer(descent)):
        assert combiner_of(optimizer) is None
    assert 'horovod' not in sys.modules


def test_without_a_cluster_they_combine_what_towers_do_not(graph):
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), tf.ones([2]), sync(), 2, 'mean',
        global_step=tf.train.get_or_create_global_step())
    assert built.machines is None and len(built.gradients) == 1


class SecondOrder(tf.train.GradientDescentOptimizer):
    """Divides the gradient by 1 + the second derivative; one that is None counts as 0."""

    def compute_gradients(self, loss, var_list=None, **options):
        pairs = super(SecondOrder, self).compute_gradients(loss, var_list, **options)
        second = tf.gradients([gradient for gradient, _ in pairs], var_list)
        return [(gradient / (1. + (0. if each is None else each)), variable)
                for (gradient, variable), each in zip(pairs, second)]


def built_with(cluster=None):
    """The gradient is 4 w, the second derivative 4; the rate is 1/10, and w begins with 1."""
    return towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.square(tf.get_variable(
            'w', [], tf.float64, tf.ones_initializer())),
        tf.constant([1., 3.], tf.float64),
        SecondOrder(tf.constant(.1, tf.float64)), 2, 'mean', cluster=cluster, check_devices=False)


@pytest.mark.parametrize('kind, rank', [('ring', 0), ('ps', 0), ('ps', 1)])
def test_on_several_a_second_derivative_is_refused(kind, rank, graph):
    """It was None on parameter servers, and this worker's own by Horovod."""
    cluster = towers.Cluster(kind, ['a:1', 'b:1'], ['c:1'] if kind == 'ps' else (), rank=rank)
    with pytest.raises(ClusterError, match='gradient over several machines, is taken: it would be'):
        built_with(cluster)
