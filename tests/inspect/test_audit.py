"""The audit: kept promises, and each promise broken on purpose."""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from towers import compat
from sample_models import linear, momentum, sgd, switched, two_layers
from case_marks import first_fast

VECTORS = samples.vectors(4)
slow = pytest.mark.slow


def of_kind(transfers, source, target):
    return [pair for pair in transfers if (pair.source, pair.target) == (
        '/device:CPU:%d' % source, '/device:CPU:%d' % target)]


# ---- promises kept ------------------------------------------------------------------------------

@slow
@pytest.mark.parametrize('version', ['v1', 'v2'])
def test_control_flow_of_either_kind_keeps_every_promise(version):
    """TF leaves TensorArrays and the stacks of loops without a device of their own."""
    def mapped(x, y):
        lengths = tf.map_fn(lambda length: length + 1, tf.cast(x[:, 0, 0], tf.int32))
        return samples.while_loop_rnn(x, y) + 0. * tf.reduce_mean(tf.cast(lengths, tf.float64))
    with switched('control_flow_v2', version == 'v2'):
        built = towers.build_towers(mapped, samples.sequences(4), sgd(), ['/cpu:1', '/cpu:2'])
        assert towers.audit(built).broken == []
        if version == 'v1':
            metadata = metadata_of_a_step(built, towers.session_config(built.devices))
            assert towers.audit(built, metadata).broken == []


# ---- transfers -----------------------------------------------------------------------------------

def test_copies_by_hand():
    built = towers.build_towers(linear, VECTORS, sgd(), 2, reduction='mean')
    transfers = towers.audit(built).transfers
    # In: 2 x 6 of x, 2 x 3 of y, 6 x 3 of the kernel. Out: the kernel's gradient and the loss.
    (there,), (back,) = of_kind(transfers, 0, 1), of_kind(transfers, 1, 0)
    assert (there.tensors, there.bytes, there.unknown) == (3, 8 * (12 + 6 + 18), 0)
    assert (back.tensors, back.bytes, back.unknown) == (2, 8 * (18 + 1), 0)
    assert len(transfers) == 2
    assert 'sent    /cpu:0 -> /cpu:1: 288 bytes a step in 3 tensors' in str(towers.audit(built))


@pytest.mark.parametrize('copies', ['clone', pytest.param('reuse', marks=slow)])
def test_a_branch_on_an_input_is_where_tf_puts_it(copies):
    def model(x):
        halved = tf.cond(tf.reduce_sum(x) > 0, lambda: x / 2, lambda: x)
        return tf.reduce_mean(tf.get_variable('w', [], initializer=tf.ones_initializer()) * halved)
    with switched('control_flow_v2', False):
        built = towers.build_towers(model, np.ones([4], np.float32), sgd(), 2, copies=copies)
    assert towers.audit(built).broken == []
    # What is computed within the branch is not the switch that hands on the input.
    stray = next(op for op in tf.get_default_graph().get_operations()
                 if op.type == 'RealDiv' and op.name.startswith('tower_1/'))
    stray._set_device('/device:CPU:0')
    assert 'tower 1 off /cpu:1: %s' % stray.name in towers.audit(built).broken[0]


@pytest.mark.parametrize('is_finished', first_fast(1, [False, True]))
def test_a_branch_in_a_branch_on_an_input_is_where_tf_puts_it(is_finished):
    def model(x):
        def smaller():
            return tf.cond(tf.reduce_sum(w) > 1., lambda: x / 2., lambda: x * w)
        return tf.reduce_mean(w * tf.cond(tf.reduce_sum(w) > 0., lambda: x, smaller))
    with switched('control_flow_v2', False):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer(), use_resource=False)
        x = tf.placeholder(tf.float32, [None])
        built = towers.build_towers(model(x) if is_finished else model, x, sgd(), 2)
    assert towers.audit(built).broken == []


# ---- promises broken ----------------------------------------------------------------------------

@pytest.mark.parametrize('copies, prefix', [
    ('clone', 'tower_1/MatMul'), ('reuse', 'tower_1/gradients/')])
def test_operations_off_their_tower(copies, prefix):
    built = towers.build_towers(two_layers, VECTORS, sgd(), ['/cpu:0', '/cpu:2'], copies=copies)
    name = next(op.name for op in tf.get_default_graph().get_operations()
                if op.type in ('MatMul', 'Mul') and op.name.startswith(prefix))
    compat.set_device(tf.get_default_graph().get_operation_by_name(name), '/device:CPU:0')
    audit = towers.audit(built)
    assert audit.broken == ['1 operation of tower 1 off /cpu:2: %s on /cpu:0' % name]
    assert str(audit).startswith('audit: 1 broken promise\n  BROKEN  1 operation of tower 1')
    with pytest.raises(towers.AuditError, match='breaks what the plan promises: 1 operation'):
        audit.raise_if_broken()


@pytest.mark.parametrize('device, found', [
    (None, '1 variable, made before the towers, on no device (the runtime chooses): kernel'),
    ('/cpu:1', 'variable kernel, made before the towers, is on /cpu:1')])
def test_a_variable_from_before_the_build_is_where_the_program_put_it(device, found):
    with tf.device(device):
        tf.get_variable('kernel', [6, 3], tf.float64)
    built = towers.build_towers(linear, VECTORS, sgd(), 2, reuse=True)
    audit = towers.audit(built)
    assert not audit.broken
    assert found in audit.notes
    line = built.plan.line('variables on')
    if device is None:
        assert line.startswith('those from before the build without a device where TensorFlow puts')
    else:
        assert line == 'those from before the build on ' + device


@pytest.mark.parametrize('use_resource', [True, False])
def test_a_slot_beside_a_variable_without_a_device_is_no_fault(use_resource):
    with tf.Graph().as_default():
        w = tf.get_variable('w', [3, 2], initializer=tf.ones_initializer(),
                            use_resource=use_resource)
        built = towers.build_towers(lambda x: tf.reduce_mean(tf.square(tf.matmul(x, w))),
                                    tf.ones([4, 3]), tf.train.MomentumOptimizer(.1, .9), 2)
        found = towers.audit(built)
        assert not found.broken and any('the runtime chooses' in note for note in found.notes)


def test_operations_that_wait_for_each_other_are_broken():
    with tf.Graph().as_default():
        built = towers.build_towers(lambda x: tf.reduce_mean(x) * tf.get_variable('w', []),
                                    tf.ones([4]), tf.train.GradientDescentOptimizer(.1), 2)
        first = tf.identity(1., 'first')
        second = tf.identity(first, 'second')
        compat.add_control_inputs(first.op, [second.op])
        assert towers.audit(built).broken == [
            '2 operations wait for each other in a circle, so that the graph never runs: '
            'second, first']
        with pytest.raises(towers.AuditError, match='in a circle'):
            towers.audit(built).raise_if_broken()


def test_a_slot_off_its_variables_device():
    built = towers.build_towers(linear, VECTORS, momentum(), 2)
    with tf.device('/cpu:1'):
        stray = tf.get_variable('kernel/Other', [6, 3])
    audit = towers.audit(built._replace(slots=built.slots + [stray]))
    assert audit.broken == ['slot kernel/Other is on /cpu:1, its variable on /cpu:0']


# ---- what the runtime placed --------------------------------------------------------------------

def metadata_of_a_step(built, config):
    metadata = tf.RunMetadata()
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, run_metadata=metadata,
                    options=tf.RunOptions(output_partition_graphs=True))
    return metadata


@pytest.mark.parametrize('name', [
    name if name == 'embedding' else pytest.param(name, marks=slow)
    for name in samples.SAMPLES])
def test_the_runtime_kept_every_promise(name):
    sample = samples.SAMPLES[name]
    built = towers.build_towers(sample.model_fn, sample.data(6), momentum(),
                                ['/cpu:2', '/cpu:0', '/cpu:1'])
    metadata = metadata_of_a_step(built, towers.session_config(built.devices))
    with tf.Graph().as_default():  # whichever graph is the default one
        audit = towers.audit(built, metadata)
    assert audit.broken == []
    assert audit.notes[-1].startswith('what the runtime placed was checked: ')
    assert audit.notes[-1].endswith(' operations on /cpu:0, /cpu:1, /cpu:2')


def test_the_runtime_moved_a_tower():
    """Soft placement hides a device that is not there: all of tower 1 runs on the first CPU."""
    built = towers.build_towers(two_layers, VECTORS, sgd(), ['/cpu:0', '/cpu:5'])
    assert towers.audit(built).broken == []
    config = towers.session_config(2)
    config.allow_soft_placement = True
    (broken,) = towers.audit(built, metadata_of_a_step(built, config)).broken
    assert broken.startswith('the runtime moved ') and 'of tower 1 off /cpu:5: tower_1/' in broken
    assert ' to /cpu:0' in broken


def test_metadata_without_partition_graphs():
    built = towers.build_towers(two_layers, VECTORS, sgd(), 2)
    for arguments, text in (((built, tf.RunMetadata()), 'output_partition_graphs=True'),
                            ((None,), 'the result of build_towers')):
        with pytest.raises(towers.InvalidArgumentError, match=text):
            towers.audit(*arguments)


# ---- what the model itself puts elsewhere -------------------------------------------------------

def on_cpu_0(x, y):
    with tf.device('/cpu:0'):
        h = tf.tanh(tf.matmul(x, tf.get_variable('kernel', [6, 3], x.dtype)))
    return samples.mean_squared_error(h, y)


def by_a_function(x, y):
    with tf.device(lambda op: '/cpu:0' if op.type == 'Tanh' else op.device):
        return linear(tf.tanh(x), y)


def in_a_loop(x, y):
    weights = tf.get_variable('weights', [6, 6], x.dtype)
    with tf.device('/cpu:0'):
        _, out = tf.while_loop(lambda i, _: i < 3,
                               lambda i, h: (i + 1, tf.tanh(tf.matmul(h, weights))), [0, x])
    return linear(out, y)


def product(x, y):
    """TensorFlow itself puts a part of the gradient of a product on the CPU."""
    return linear(x * tf.reduce_prod(tf.get_variable('factors', [2], x.dtype)), y)


def reset(x, y):
    with tf.device(None):
        h = tf.tanh(x, name='anywhere')
    return linear(h, y)


@pytest.mark.parametrize('model_fn, operation, where, copies', first_fast(2, [
    (on_cpu_0, 'Tanh', '/cpu:0', 'clone'), (product, 'gradients/', '/cpu:0', 'reuse'), (by_a_function, 'Tanh', '/cpu:0', 'reuse'),
    (in_a_loop, 'while/Tanh', '/cpu:0', 'clone'),
    (reset, 'anywhere', 'no device', 'clone')]),
    ids=lambda value: getattr(value, '__name__', ''))
def test_what_the_model_puts_elsewhere_is_a_note(model_fn, operation, where, copies):
    built = towers.build_towers(model_fn, VECTORS, momentum(), ['/cpu:1', '/cpu:2'], copies=copies)
    audit = towers.audit(built)
    assert audit.broken == []
    for tower, scope in enumerate(['' if copies == 'clone' else 'tower_0/', 'tower_1/']):
        (note,) = [note for note in audit.notes if re.match(
            r"\d+ operations? of tower %d on %s by the model's own tf.device: %s" % (
                tower, where, scope), note)]
        assert scope + operation in note or int(note.split()[0]) > 3
