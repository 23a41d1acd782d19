"""What is said when memory runs out: of an error made by hand, and of real ones."""

import re
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import OutOfMemoryError
from towers.memory.out_of_memory import out_of_memory

TEXT = ('OOM when allocating tensor with shape[64,500] and type float on '
        '/job:localhost/replica:0/task:0/device:CPU:1 by allocator cpu\n'
        '\t [[{{node tower_1/MatMul}}]]')


def build(devices=2, batch=64, model=None):
    def plain(x):
        weights = tf.get_variable('weights', [1000, 500], use_resource=True)
        net = tf.matmul(x, weights)
        for _ in range(9):
            net = tf.sigmoid(net)
        return tf.reduce_mean(net)
    return towers.build_towers(model or plain, (tf.random_uniform([batch, 1000]), ),
                               tf.train.MomentumOptimizer(0.1, 0.9),
                               towers.resolve_devices(devices, check=False))


def error(text=TEXT):
    return tf.errors.ResourceExhaustedError(None, None, text)


def test_it_names_tower_tensor_largest_batch_and_checkpoint():
    text = str(out_of_memory(error(), build(batch=4096), 'runs/a/model.ckpt-7', 12 * 10 ** 6))
    assert text.startswith('Tower 1 on /cpu:1 ran out of memory in tower_1/MatMul, for a tensor of '
                           'shape [64, 500] (float, 0.1 MB).')
    assert 'there are 12.0 MB' in text
    # [4096, 1000] floats; then [2048, 500] of each tower.
    assert re.search(
        r'The largest of it: random_uniform\S*, 16\.4 MB \(input\); ', text), text
    assert ', 4.1 MB (' in text
    assert 'The largest batch that should fit: ' in text
    assert 'accumulate=64, micro-batches of 64: ' in text  # the least that fits, or most pieces
    assert "recompute='auto'" in text
    assert 'no help, as CPUs share one memory' in text
    assert text.endswith('Nothing of this step was saved; the run goes on from '
                         'runs/a/model.ckpt-7.')


def test_a_full_disk_is_another_matter():
    assert out_of_memory(error('runs/a; No space left on device'), build()) is None


def test_more_towers_and_stages_help_where_each_device_has_its_own_memory():
    built = build(['/gpu:0', '/gpu:1'], 4096)
    peak = towers.memory_account(built).peak
    text = str(out_of_memory(error(), built, None, 10 ** 9))
    # Two micro-batches are enough: half of the batch, and a sum of gradients on each device.
    assert 'accumulate=2, micro-batches of 2048: %.1f MB' % (
        (towers.memory_account(built, 2048).peak + 1000 * 500 * 4) / 1e6) in text
    assert re.search(r'4 towers: [0-9.]+ MB each', text)
    assert 'two stages a tower: about %.1f MB each' % (peak / 2e6) in text


def huge(x):
    """Asks for 4 TB in its forward pass, which no optimization of the graph takes out."""
    weights = tf.get_variable('weights', [1000, 4], use_resource=True)
    size = tf.placeholder_with_default([2 ** 20, 2 ** 20], [2])  # one of 2 ** 40 is 0 on TF 1.15
    return tf.reduce_mean(tf.matmul(x, weights)) + tf.reduce_sum(
        tf.tanh(tf.tile(tf.reduce_mean(weights, keepdims=True), size)))


@pytest.mark.slow  # oneDNN's allocator tries for ten seconds
def test_a_real_one(tmp_path):
    built = build(1, model=huge)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, str(tmp_path / 'model.ckpt'), 3)
        with pytest.raises(OutOfMemoryError) as caught:
            with towers.out_of_memory_explained(built, str(tmp_path)):
                session.run(built.train_op)
    assert 'Tower ' in str(caught.value) and '[1048576, 1048576]' in str(caught.value)
    assert str(caught.value).endswith('goes on from %s/model.ckpt-3.' % tmp_path)
    assert isinstance(caught.value.__cause__, tf.errors.ResourceExhaustedError)


def test_around_a_loop_with_hooks():
    class Failing(tf.train.SessionRunHook):
        """Stands for a step that runs out of memory."""

        def before_run(self, run_context):
            raise error()
    built = build()
    tf.train.get_or_create_global_step()
    with pytest.raises(OutOfMemoryError, match='Tower 1 on /cpu:1 ran out of memory'):
        with towers.out_of_memory_explained(built, memory_limit=10 ** 7):
            with tf.train.MonitoredTrainingSession(
                    config=towers.session_config(built.devices), hooks=[Failing()]) as session:
                session.run(built.train_op)


@pytest.mark.slow
def test_a_training_session_says_it(tmp_path):
    global_step = tf.train.get_or_create_global_step()
    built = build(1, model=huge)
    with pytest.raises(OutOfMemoryError, match='ran out of memory') as caught:
        with towers.training_session(str(tmp_path), global_step, [], built=built,
                                     say=lambda line: None) as session:
            session.run(built.train_op)
    assert 'model.ckpt-0' in str(caught.value)
    assert towers.newest_checkpoint(str(tmp_path)).step == 0


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError):
        with towers.out_of_memory_explained(build()):
            raise ZeroDivisionError
    with pytest.raises(tf.errors.ResourceExhaustedError):
        with towers.out_of_memory_explained(build_other()):
            raise error('No space left on device')


def build_other():
    with tf.Graph().as_default():
        return build()
