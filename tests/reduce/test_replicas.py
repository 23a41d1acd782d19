"""VariablePlacement('replicated'): a replica on every tower, equal numbers, equal checkpoints."""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import momentum, sgd, two_layers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers.run.evaluation import Evaluation
from towers.graph.graph_walk import step_operations

VECTORS = samples.vectors(12)
slow = pytest.mark.slow
OPTIMIZERS = {
    'sgd': sgd, 'momentum': momentum, 'adam': lambda: tf.train.AdamOptimizer(0.01),
    'rmsprop': lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.9)}


def build(model_fn=two_layers, data=VECTORS, optimizer=momentum, devices=2, **options):
    options.setdefault('variables', towers.VariablePlacement('replicated'))
    return towers.build_towers(
        model_fn, tuple(data), optimizer and samples.objective(optimizer(), options), devices,
        **options)


def initialize(session):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])


def assert_replicas_are_equal(built, session):
    """Bit by bit, slots included."""
    own = {v.op.name: v for v in built.variables + built.slots}
    assert built.replicas.variables
    for replica in built.replicas.variables + built.replicas.slots:
        # 'w/Adam' of 'w_replica_1/w/Adam'
        original = own[re.split(r'_replica_\d+/', replica.op.name)[1]]
        ours, theirs = session.run([original, replica])
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes(), replica.op.name


# ---- the variables ------------------------------------------------------------------------------

def assert_each_reads_its_own_replica(built):
    for tower in built.towers:
        reads = {tensor.op.name.split('/')[0] for op in step_operations([tower.data_loss])
                 if tower.has(op.name) for tensor in op.inputs}
        assert reads & {'body', 'head', 'body_replica_1', 'head_replica_1'} == (
            {'body_replica_1', 'head_replica_1'} if tower.index else {'body', 'head'})


def test_updates_and_sums_are_on_their_towers():
    built = build(devices=towers.resolve_devices(['/gpu:1', '/gpu:0'], check=False))
    writes = [op for op in step_operations([built.train_op]) if 'ApplyMomentum' in op.type]
    assert sorted((op.inputs[0].op.name, op.device) for op in writes) == [
        ('body', '/device:GPU:1'), ('body_replica_1/body', '/device:GPU:0'),
        ('head', '/device:GPU:1'), ('head_replica_1/head', '/device:GPU:0')]
    for op in writes:
        assert op.inputs[1].op.device == op.device  # its slot
    sums = [op for op in step_operations([built.train_op]) if op.type == 'AddN'
            and op.name.startswith('combine_gradients/')]
    assert sorted(op.device for op in sums) == ['/device:GPU:0', '/device:GPU:1']
    assert_each_reads_its_own_replica(built)
    for tower in built.towers:
        assert tower.variables == built.variables
        assert [v for _, v in tower.gradients] == built.variables


def test_one_tower_has_no_replicas():
    built = build(devices=towers.resolve_devices(['/gpu:1'], check=False))
    assert built.replicas is None and not tf.local_variables()
    assert {v.device for v in built.variables + built.slots} == {'/device:GPU:1'}
    assert '  variables on     /gpu:1' in str(built.plan).split('\n')


# ---- numbers ------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, num_towers', [('adam', 2)] + [
    pytest.param(*case, marks=slow) for case in [('rmsprop', 2), ('momentum', 4)]])
def test_the_numbers_of_one_device(name, num_towers):
    """Gradients, variables and slots; regularization counted once."""
    samples.check_against_one_device(
        samples.slim_layers, VECTORS, OPTIMIZERS[name], num_towers, penalty=samples.l2_of_kernels,
        variables=towers.VariablePlacement('replicated'))


def test_an_optimizer_that_has_made_slots_before_is_refused():
    optimizer = momentum()
    build(optimizer=lambda: optimizer, devices=1)
    with pytest.raises(towers.InvalidArgumentError, match='makes slot body_replica_1/body/Momentum '
                       'for a replica of body, which has no slot to take the value of'):
        build(optimizer=lambda: optimizer, reuse=tf.AUTO_REUSE)


# ---- initial values and checkpoints -------------------------------------------------------------

@pytest.mark.slow
def test_replicas_start_as_the_models_own_and_are_refreshed(kind_of_variables):
    """Random initial values. Both initializers in one run: in a new session, since in a used one
    the replicas may be given the values from before that run. One after the other: in any."""
    built = build(optimizer=OPTIMIZERS['adam'], devices=3)
    refresh = built.replicas.refresh()
    globals_, locals_ = tf.global_variables_initializer(), tf.local_variables_initializer()
    for _ in range(2):
        with tf.Session(config=towers.session_config(3)) as session:
            session.run([globals_, locals_])
            assert_replicas_are_equal(built, session)
    with tf.Session(config=towers.session_config(3)) as session:
        for _ in range(2):
            session.run(globals_)
            session.run(locals_)
            assert_replicas_are_equal(built, session)
            session.run(built.train_op)  # what was trained is not drawn anew
            before = session.run(built.variables + built.slots)
            session.run(locals_)
            after = session.run(built.variables + built.slots)
            assert all(np.array_equal(*both) for both in zip(before, after))
            assert_replicas_are_equal(built, session)
        for variable in built.variables + built.slots:
            variable.load(np.full(variable.shape.as_list(), 7.), session)
        assert (session.run(built.replicas.variables[0]) != 7.).any()
        session.run(refresh)
        assert (session.run(built.replicas.variables[0]) == 7.).all()
        assert_replicas_are_equal(built, session)


# ---- several builds in one graph ----------------------------------------------------------------

@pytest.mark.slow
def test_evaluation_reads_the_models_own_variables():
    built = build(devices=3)
    data = tf.data.Dataset.from_tensor_slices(VECTORS).batch(3)
    evaluation = Evaluation(two_layers, data, trained=built,
                            variables=towers.VariablePlacement('replicated'))
    assert evaluation.built.replicas is None
    assert evaluation.built.variables == built.variables
    with tf.Session(config=towers.session_config(3)) as session:
        initialize(session)
        expected = session.run(built.loss)
        assert evaluation.run(session)['loss'] == pytest.approx(expected, rel=1e-12)
    assert not towers.audit(evaluation.built).broken


@pytest.mark.slow
def test_two_builds_share_their_replicas(kind_of_variables):
    """As the two steps of a GAN: each trains a part, both read all."""
    def pair(**options):
        first = towers.build_towers(two_layers, VECTORS,
                                    towers.Objective(sgd(), var_list=lambda v: v[:1]), 2, **options)
        second = towers.build_towers(two_layers,
                                     VECTORS,
                                     towers.Objective(sgd(), var_list=lambda v: v[1:]),
                                     2,
                                     reuse=first,
                                     **options)
        return first, second
    results = []
    for options in ({}, dict(variables=towers.VariablePlacement('replicated'))):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            first, second = pair(**options)
            with tf.Session(config=towers.session_config(2)) as session:
                initialize(session)
                start = [np.full(v.shape.as_list(), 0.1) for v in first.variables]
                for variable, value in zip(first.variables, start):
                    variable.load(value, session)
                if options:
                    session.run(first.replicas.refresh())
                    assert first.replicas.variables == second.replicas.variables
                for _ in range(2):
                    session.run(first.train_op)
                    session.run(second.train_op)
                results.append(session.run(first.variables))
                if options:
                    assert_replicas_are_equal(first, session)
    for one, other in zip(*results):
        assert samples.relative_difference(one, other) < 1e-12


@pytest.mark.slow
def test_builds_that_would_let_replicas_go_stale_are_refused():
    first = build(variables=towers.VariablePlacement(None))
    with pytest.raises(towers.InvalidArgumentError, match="reuse= is a build that trains the same "
                       'variables without replicas'):
        build(reuse=first)
    with tf.Graph().as_default():
        first = build()
        with pytest.raises(towers.InvalidArgumentError,
                           match='variable body has replicas on more than 1 tower, '
                           'of an earlier build'):
            build(reuse=first, variables=towers.VariablePlacement(None))
    with tf.Graph().as_default():
        first = build()
        with pytest.raises(towers.DeviceError, match='variable body has replicas on /device:CPU:1 '
                           'already.*to have some on /device:CPU:2'):
            build(reuse=first, devices=['/cpu:0', '/cpu:2'])


def test_a_build_that_would_not_update_all_replicas_is_refused():
    first = build(devices=3)
    assert build(reuse=first, optimizer=None, devices=2).loss is not None  # it updates none
    with pytest.raises(towers.InvalidArgumentError, match='variable body has replicas on more than '
                       '2 towers, of an earlier build'):
        build(reuse=first, devices=2)


def test_a_name_that_is_taken():
    tf.constant(1., name='body_replica_1/body')
    with pytest.raises(towers.NameScopeError, match="operation 'body_replica_1/body', which is to "
                       'be the name of a replica of variable body'):
        build()


# ---- plan, audit, arguments ---------------------------------------------------------------------

def variables_line(plan):
    return str(plan).split('  variables on     ')[1].split('\n')[0]


def test_the_audit_finds_every_promise_kept(kind_of_variables):
    sample = samples.SAMPLES['tf.Variable']
    built = build(sample.model_fn, sample.data(6), momentum, ['/cpu:2', '/cpu:0', '/cpu:1'])
    metadata = tf.RunMetadata()
    with tf.Session(config=towers.session_config(3)) as session:
        initialize(session)
        session.run(built.train_op, run_metadata=metadata,
                    options=tf.RunOptions(output_partition_graphs=True))
    audit = towers.audit(built, metadata)
    assert audit.broken == []
    assert variables_line(built.plan) == 'every tower (3 replicas)'
    count = len(built.replicas.variables)
    assert ('%d replicas of trainable variables, and their %d slots, take %s on /cpu:0, /cpu:1' % (
        count, count, '%.1f kB' % (built.replicas.bytes() / 1e3)
        if built.replicas.bytes() >= 1000 else '%d bytes' % built.replicas.bytes())
        in audit.notes)


# ---- variables that the model does not come by through get_variable ------------------------------


@pytest.mark.slow
def test_functions_with_a_gradient_of_their_own_read_the_replica():
    """The gradient depends on the variable, so that one of other weights would be seen."""
    def model_fn(x):
        with tf.variable_scope('', use_resource=True):
            w = tf.get_variable('w', [], x.dtype, tf.constant_initializer(2.))

        @tf.custom_gradient
        def scaled(x):
            return x * w * w, lambda dy, variables=None: (
                dy * w * w, [3. * tf.reduce_sum(dy * x * w)])  # 3: not what TensorFlow would make
        return tf.reduce_mean(scaled(x))
    built = samples.check_against_one_device(
        model_fn, [np.float64([1., 2., 3., 6.])], lambda: sgd(0.03125), reduction='mean',
        memory=towers.Memory(accumulate=2), variables=towers.VariablePlacement('replicated')).built
    assert len(built.replicas.variables) == 1
    with tf.Session(graph=built.loss.graph, config=towers.session_config(2)) as session:
        session.run([v.initializer for v in built.variables])
        session.run([v.initializer for v in built.replicas.variables])
        assert session.run(built.gradients[0][0]) == 3. * 3. * 2.
