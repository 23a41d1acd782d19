"""`Cluster`: what it makes of TF_CONFIG, and what it refuses."""

import contextlib
import json
import sys

import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from towers import Cluster
from towers.optimizers import combiner_of
from towers.errors import ClusterError, InvalidArgumentError, MissingPackageError

ONE, TWO, THREE = 'a:1', 'b:2', 'c:3'


def config(task, **jobs):
    return {'TF_CONFIG': json.dumps({'cluster': jobs, 'task': task and dict(
        zip(('type', 'index'), task))} if task else {'cluster': jobs})}


@pytest.mark.parametrize('task, job, rank, is_chief', [
    (('chief', 0), 'worker', 0, True), (('worker', 0), 'worker', 1, False),
    (('worker', 1), 'worker', 2, False), (('ps', 0), 'ps', 0, False),
    (('evaluator', 0), 'evaluator', 0, False)])
def test_tf_config_as_tf_users_write_it(task, job, rank, is_chief):
    cluster = Cluster.from_tf_config(None, config(
        task, chief=[ONE], worker=[TWO, THREE], ps=['d:4']))
    assert cluster.kind == 'ps'
    assert (cluster.job, cluster.rank, cluster.is_chief) == (job, rank, is_chief)
    assert cluster.workers == (ONE, TWO, THREE) and cluster.ps == ('d:4',)


@pytest.mark.parametrize('environment, expected', [
    ({}, 'needs a worker'),
    ({'TF_CONFIG': '{"cluster": {"ps": ["c:1"]}, "task": {"type": "ps", "index": 0}}'},
     'a cluster needs a worker'),
    (config(('worker', 0.5), worker=[ONE]), 'index 0.5 is no whole number'),
    (config(('worker', 0), worker=['a']), "'a' is no address"),
    (config(None, worker=[ONE]), 'no task')])
def test_a_tf_config_that_makes_no_sense_is_an_error(environment, expected):
    with pytest.raises(ClusterError, match=expected):
        Cluster.from_tf_config(None, environment)


@pytest.mark.parametrize('arguments, error, expected', [
    (dict(kind='mesh'), InvalidArgumentError, 'kind='),
    (dict(kind='ps'), ClusterError, 'needs a parameter server'),
    (dict(kind='ring', ps=[THREE]), InvalidArgumentError,
     r"ps=\('c:3',\) goes with kind='ps', and this is kind='ring': leave it out, or use that"),
    (dict(kind='ps', ps=[TWO]), ClusterError, 'b:2 is the address of two tasks'),
    (dict(workers=['a:1', 'A:1']), ClusterError, 'a:1 is the address of two tasks'),
    (dict(kind='ring', synchronous=False), InvalidArgumentError,
     "synchronous=False goes with kind='ps'"),
    (dict(active=1), InvalidArgumentError, 'until_all_end'),
    (dict(wire='int8'), InvalidArgumentError, "wire='int8': expected one of 'bfloat16', 'float16'"),
    (dict(kind='ps', ps=[THREE], wire='float16'), InvalidArgumentError,
     "wire='float16' goes with kind='ring', and this is kind='ps'"),
    (dict(workers=[ONE, TWO, THREE, 'd:4'], wire='bfloat16'), InvalidArgumentError,
     "wire='bfloat16': .* of more than 3 workers are no fewer bytes than the ring's. Leave it out"),
    (dict(buffer_mb=0), InvalidArgumentError, 'buffer_mb=0: expected a number of MiB'),
    (dict(every=0), InvalidArgumentError, 'every=0: expected'),
    (dict(every=2, wire='float16'), InvalidArgumentError, 'no gradient travels.*leave wire out'),
    (dict(kind='ps', ps=[THREE], every=2), InvalidArgumentError, "every=2 goes with kind='ring'"),
    (dict(kind='ps', ps=[THREE], buffer_mb=1.), InvalidArgumentError, 'buffer_mb=1.0 goes with')])
def test_what_does_not_go_together_is_refused(arguments, error, expected):
    with pytest.raises(error, match=expected):
        Cluster(**dict(dict(workers=[ONE, TWO]), **arguments))


def test_sessions_see_their_own_machine_and_the_servers():
    ring = Cluster('ring', [ONE, TWO], rank=1).session_config(tf.ConfigProto())
    assert list(ring.device_filters) == ['/job:worker/task:1']
    assert ring.experimental.collective_group_leader == '/job:worker/replica:0/task:0'
    served = Cluster('ps', [ONE, TWO], [THREE], rank=1).session_config(tf.ConfigProto())
    assert list(served.device_filters) == ['/job:ps', '/job:worker/task:1']


def test_horovod_that_is_not_there_names_the_ring(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'horovod', None)
    with pytest.raises(MissingPackageError, match=(
            "`pip install horovod` .* builds for TensorFlow 1.15 to 2.18; or use kind='ring'")):
        Cluster('horovod')


def build(cluster, **options):
    inputs = tf.zeros([8, 2], tf.float64)

    def model_fn(inputs):
        weights = tf.get_variable('w', [2], tf.float64)
        return tf.reduce_mean(inputs * weights)
    optimizer = options.pop('optimizer', tf.train.GradientDescentOptimizer(0.1))
    return towers.build_towers(model_fn, inputs, optimizer, 2, cluster=cluster, **options)


def test_the_plan_counts_all_machines():
    text = ' '.join(str(build(Cluster('ring', [ONE, TWO, THREE], wire='bfloat16')).plan).split())
    assert ("TensorFlow's ring of 3 workers, dense gradients travel as bfloat16 and are added up "
            'in float32; this is worker 0; 6 towers in all, batch 24 = 3 x 8') in text
    assert "6 x the gradient of the batch's mean loss" in text
    assert '6 x 0.1 = 0.6' in text
    assert 'listen on every interface' in text


@pytest.mark.parametrize('cluster, options, expected', [
    (Cluster('ps', [ONE], [TWO], 'ps', 0), {}, 'builds no towers'),
    (Cluster('ring', [ONE], job='evaluator'), {}, 'an evaluator, which trains nothing'),
    (Cluster('ps', [ONE, TWO], [THREE]), dict(variables=towers.VariablePlacement('replicated')),
     'leave one out'),
    (Cluster('ring', [ONE, TWO]), dict(optimizer={
        'one': tf.train.GradientDescentOptimizer(1.), 'other': tf.train.AdamOptimizer()}),
     'there are several .one, other'),
    ('ring', {}, 'expected a towers.Cluster')])
def test_builds_that_a_cluster_cannot_train(cluster, options, expected, graph):
    with pytest.raises((ClusterError, InvalidArgumentError), match=expected):
        build(cluster, **options)
    assert tf.global_variables() == []


def test_what_was_built_without_the_cluster_cannot_join_it():
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.ones([2]), tf.train.GradientDescentOptimizer(.1), 1)
    with pytest.raises(ClusterError, match='built was made without a cluster: pass cluster= to'):
        with towers.join(Cluster('ring', [ONE]), built):
            pass


def test_what_tf_config_says_is_not_given_as_well():
    with pytest.raises(InvalidArgumentError, match='rank=1: TF_CONFIG says it'):
        Cluster.from_tf_config(None, {}, rank=1)


@pytest.mark.parametrize('cluster, task, expected', [
    ({'chief': [ONE, TWO]}, {'type': 'chief'}, 'several chiefs.*put the others under "worker"'),
    ({'chief': [ONE], 'master': [ONE]}, {'type': 'chief'}, 'several chiefs'),
    ({}, {'type': ['worker']}, "a job .'worker'.: expected some of chief, worker"),
    ({'worker': [ONE, TWO]}, {'type': 'worker'},
     '2 tasks of the job worker, and nothing says which'),
    ({'worker': [ONE, TWO]}, {'type': 'worker', 'index': 2},
     'the task worker 2, and its cluster has 2 of them: num'),
    ({'worker': [ONE, TWO]}, {'type': 'ps', 'index': 0}, 'task ps 0, and its cluster has 0')])
def test_what_contradicts_itself_and_no_task_is_guessed(cluster, task, expected):
    with pytest.raises(ClusterError, match=expected):
        Cluster.from_tf_config(None, {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': task})})


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
                            make(), 1, 'mean', cluster=Cluster('ring', [ONE, TWO]))
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
    optimizer = type('_DistributedOptimizer', (tf.train.GradientDescentOptimizer,), {
        '__module__': 'horovod.tensorflow'})(.1)
    assert combiner_of(optimizer) is optimizer
    built = towers.build_towers(loss_of_w, tf.ones([2]), optimizer, 2, 'mean')
    assert built.machines is None and len(built.gradients) == 1


def loss_of_w(x):
    return tf.reduce_mean(x * tf.get_variable('w', []))


def by_setter():
    return tf.device(tf.train.replica_device_setter(ps_tasks=2))


def made_on_a_server(x):
    with by_setter():
        return loss_of_w(x)


@pytest.mark.parametrize('case, place', [
    ('setter', 'a variable on /job:ps/task:0'), ('name', 'a variable on /job:ps/task:3'),
    ('function', 'a variable on /job:ps'), ('model', 'a variable on /job:ps/task:0'),
    ('step', 'a variable on /job:ps/task:0'), ('sync', 'a SyncReplicasOptimizer'),
    ('tower', 'a SyncReplicasOptimizer')])
def test_a_program_for_parameter_servers_is_refused_without_a_cluster(case, place, graph):
    scope = {'setter': by_setter, 'name': lambda: tf.device('/job:ps/task:3'),
             'function': lambda: tf.device(
                 lambda op: '/job:ps' if op.type.startswith('Var') else '')}.get(
                     case, contextlib.nullcontext)
    optimizer = {'sync': sync, 'tower': lambda: towers.TowerOptimizer(sync)}.get(case, descent)()
    with by_setter() if case == 'step' else contextlib.nullcontext():
        tf.train.get_or_create_global_step()
    with scope(), pytest.raises(ClusterError) as raised:
        towers.build_towers(made_on_a_server if case == 'model' else loss_of_w, tf.ones([2]),
                            optimizer, 2)
    assert str(raised.value).startswith('this program is one for parameter servers (%s), ' % place)
    assert 'pass cluster=towers.Cluster(…)' in str(raised.value)


def test_servers_may_be_named_by_the_placement_and_around_an_evaluation(graph):
    with by_setter():
        placed = towers.build_towers(
            loss_of_w, tf.ones([2]), descent(), towers.resolve_devices(2, check=False),
            variables=towers.VariablePlacement('/job:ps/task:0/cpu:0'))
        towers.build_towers(loss_of_w, tf.ones([2]), None, 2, reuse=placed)
    with tf.Graph().as_default(), by_setter():
        towers.build_towers(loss_of_w, tf.ones([2]), descent(), 2,
                            cluster=Cluster('ps', [ONE, TWO], [THREE]))


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
        SecondOrder(tf.constant(.1, tf.float64)), towers.resolve_devices(2, check=False), 'mean',
        cluster=cluster)


@pytest.mark.parametrize('kind, rank', first_fast(2, [('ring', 0), ('ps', 1), ('ps', 0)]))
def test_on_several_a_second_derivative_is_refused(kind, rank, graph):
    """It was None on parameter servers, and this worker's own by Horovod."""
    cluster = towers.Cluster(kind, ['a:1', 'b:1'], ['c:1'] if kind == 'ps' else (), rank=rank)
    with pytest.raises(LookupError, match='gradient over several machines would be of one'):
        built_with(cluster)
