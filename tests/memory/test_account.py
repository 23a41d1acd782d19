"""Where the memory goes, for networks that can be counted by hand."""

import pytest
import tensorflow.compat.v1 as tf

import towers

WIDTH, BATCH = 256, 512


def dense_net(features, labels):
    """Two dense layers of 256 x 256 without biases, a mean."""
    net = features
    for name in ('one', 'two'):
        with tf.variable_scope(name):
            weights = tf.get_variable('weights', [WIDTH, WIDTH], use_resource=True)
        net = tf.sigmoid(tf.matmul(net, weights))
    return tf.reduce_mean(tf.square(tf.reduce_mean(net, 1) - labels))


def build(num_towers=1, optimizer=None, **options):
    inputs = (tf.placeholder(tf.float32, [BATCH, WIDTH]), tf.placeholder(tf.float32, [BATCH]))
    return towers.build_towers(dense_net, inputs, optimizer or tf.train.AdamOptimizer(),
                               num_towers, **options)


account = towers.memory_account


def test_kinds_by_hand():
    memory, = account(build()).devices
    weights = 2 * WIDTH * WIDTH * 4
    assert memory.kinds['parameters'] == weights
    assert memory.kinds['slots'] == 2 * weights + 8  # Adam's, with two powers of beta
    assert memory.kinds['initial values'] == 2 * weights  # zeros of the slots
    # The first layer's result; over the second's its own gradient has been written by then.
    assert memory.kinds['activations'] == BATCH * WIDTH * 4
    assert memory.kinds['input'] == BATCH * WIDTH * 4 + BATCH * 4
    assert memory.peak == sum(memory.kinds.values()) == sum(
        tensor.bytes for tensor in memory.tensors)


def test_what_the_allocator_hands_out_beyond(monkeypatch):
    built = build(2)
    plain = account(built)
    monkeypatch.setenv('TF_CPU_ALLOCATOR_USE_BFC', 'true')
    found = account(built)
    assert found.peak == pytest.approx(1.05 * plain.peak, abs=1)


def test_towers_have_activations_and_the_variables_are_on_one():
    found = account(build(4, tf.train.MomentumOptimizer(0.1, 0.9)))
    assert [each.device for each in found.devices] == ['/device:CPU:%d' % k for k in range(4)]
    for each in found.devices[1:]:
        assert 'parameters' not in each.kinds and 'slots' not in each.kinds
        assert each.kinds['activations'] == BATCH // 4 * WIDTH * 4
    assert found.devices[0].kinds['parameters'] == 2 * WIDTH * WIDTH * 4
    assert max(each.peak for each in found.devices) <= found.together.peak
    assert found.peak == found.together.peak  # one memory
    text = str(found)
    assert text.startswith('memory of a step, batch 512, MB at the worst moment of each device')
    for part in ('/cpu:0', '/cpu:3', 'together', 'activations', 'the worst moment: ',
                 'largest tensors then'):
        assert part in text


def test_gpus_have_a_memory_each():
    found = account(build(towers.resolve_devices(['/gpu:0', '/gpu:1'], check=False),
                          tf.train.MomentumOptimizer(0.1, 0.9)))
    first, cpu = [next(each for each in found.devices if each.device == '/device:%s:0' % kind)
                  for kind in ('GPU', 'CPU')]
    # Variables on the CPU are copied to each GPU that reads them.
    assert first.kinds['copies'] >= WIDTH * WIDTH * 4
    assert cpu.kinds['parameters'] == 2 * WIDTH * WIDTH * 4
    assert [each.device for each in found.pools()] == ['/device:GPU:0', '/device:GPU:1']
    assert found.peak == max(each.peak for each in found.pools()) < cpu.peak
    assert first.kinds['allocator'] > 0  # GPUs always have it
    assert str(found).endswith("CUDA's own memory")


@pytest.mark.slow
@pytest.mark.parametrize('where, of_gpus', [
    (None, [0, 0]), ('balanced', [1, 1]), ('replicated', [2, 2])])
def test_gpus_have_the_variables_that_are_on_them(where, of_gpus):
    """Two variables of 256 x 256: on the CPU, one on each GPU, or both on each GPU."""
    options = {} if where is None else {'variables': towers.VariablePlacement(where)}
    found = account(build(towers.resolve_devices(['/gpu:0', '/gpu:1'], check=False),
                          tf.train.MomentumOptimizer(0.1, 0.9), **options))
    kinds = {each.device: each.kinds for each in found.devices}
    bytes_of_variable = WIDTH * WIDTH * 4
    for number, count in enumerate(of_gpus):
        of_gpu = kinds['/device:GPU:%d' % number]
        assert of_gpu.get('parameters', 0) == count * bytes_of_variable
        held = of_gpu.get('parameters', 0) + of_gpu.get('copies', 0)
        assert held >= bytes_of_variable  # its own, or a copy of the CPU's
    slots = [kinds['/device:GPU:%d' % number].get('slots', 0) for number in (0, 1)]
    assert sum(slots) == sum(of_gpus) * bytes_of_variable


def test_evaluation_has_neither_gradients_nor_slots():
    inputs = (tf.placeholder(tf.float32, [BATCH, WIDTH]), tf.placeholder(tf.float32, [BATCH]))
    found = account(towers.build_towers(dense_net, inputs, None, 1))
    assert not {'slots', 'gradients', 'backward', 'activations'} & set(found.together.kinds)


def test_at_twice_the_batch_gradients_of_weights_are_as_large_as_before():
    built = build()
    one, two = [account(built, size).devices[0].kinds for size in (BATCH, 2 * BATCH)]
    for kind in ('parameters', 'slots', 'gradients'):
        assert two.get(kind) == one.get(kind), kind
    assert two['activations'] == 2 * one['activations']
