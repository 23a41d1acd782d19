"""What is said when memory runs out: of an error made by hand, and of real ones."""

import re
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import OutOfMemoryError

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


@pytest.mark.slow
def test_it_names_tower_tensor_and_largest_batch():
    with pytest.raises(OutOfMemoryError) as caught:
        with towers.out_of_memory_explained(build(batch=4096), memory_limit=12 * 10 ** 6):
            raise error()
    text = str(caught.value)
    assert text.startswith('Tower 1 on /cpu:1 ran out of memory in tower_1/MatMul: OOM when '
                           'allocating tensor with shape[64,500] and type float on ')
    assert 'there are 12.0 MB' in text
    # [4096, 1000] floats; then [2048, 500] of each tower.
    assert re.search(
        r'The largest of it: random_uniform\S*, 16\.4 MB \(input\); ', text), text
    assert ', 4.1 MB (' in text
    assert 'The largest batch that should fit: ' in text
    assert re.search(r"accumulate=\d+\), or Memory\(recompute='auto'\) \(CPUs share", text), text


def test_a_full_disk_is_another_matter():
    built = build()
    for other in (error('runs/a; No space left on device'), ZeroDivisionError()):
        with pytest.raises(type(other)):
            with towers.out_of_memory_explained(built):
                raise other


def huge(x):
    """Asks for 4 TB in its forward pass, which no optimization of the graph takes out."""
    weights = tf.get_variable('weights', [1000, 4], use_resource=True)
    size = tf.placeholder_with_default([2 ** 20, 2 ** 20], [2])  # one of 2 ** 40 is 0 on TF 1.15
    return tf.reduce_mean(tf.matmul(x, weights)) + tf.reduce_sum(
        tf.tanh(tf.tile(tf.reduce_mean(weights, keepdims=True), size)))


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
