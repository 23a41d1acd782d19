"""towers.placement: the device of every variable, reference and resource, under each policy."""

import collections
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import VariablePlacement, build_towers
from towers.errors import DeviceError, InvalidArgumentError

CPUS = ('/device:CPU:0', '/device:CPU:1', '/device:CPU:2')


def devices_of_variables():
    return {variable.op.name: variable.device for variable in tf.global_variables()}


def bytes_on(built):
    sizes = collections.Counter()
    for variable in built.variables:
        sizes[variable.device] += variable.shape.num_elements() * variable.dtype.base_dtype.size
    return dict(sizes)


def model_with(make_variables):
    """A model function that uses all the variables that `make_variables` returns."""
    def model_fn(x):
        return tf.reduce_mean(x) * tf.add_n([tf.cast(tf.reduce_sum(v), tf.float32)
                                             for v in make_variables()])
    return model_fn


def build(make_variables, devices, **kwargs):
    return build_towers(model_with(make_variables), np.ones([6, 1], np.float32),
                        tf.train.MomentumOptimizer(0.1, 0.9),
                        towers.resolve_devices(devices, check=False), **kwargs)


def one_of_each_kind():
    with tf.variable_scope('scope'):
        return [tf.get_variable('got', [2]), tf.Variable([1.], name='made'),
                tf.get_variable('given', initializer=np.float32([1.]))]


@pytest.mark.parametrize('devices,variable_device,expected', [
    (['/gpu:0', '/gpu:1'], None, '/device:CPU:0'),  # the recipe: the CPU
    (['/gpu:2'], None, '/device:GPU:2'),            # just one GPU: on it
    (['/cpu:0', '/cpu:1'], 'cpu:1', '/device:CPU:1')] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (['/gpu:0'], '/cpu:0', '/device:CPU:0'),
            (['/cpu:1'], '/job:ps/task:0/cpu:0', '/job:ps/task:0/device:CPU:0')]])
def test_one_device_for_all(devices, variable_device, expected):
    built = build(one_of_each_kind, devices, variables=VariablePlacement(variable_device))
    assert built.placement.main == expected
    assert built.placement.devices() == (expected,)
    for variable in built.variables + built.slots:
        assert variable.device == expected, variable.op.name
        assert variable.op.type == 'VarHandleOp'
    assert {v.op.name for v in built.variables} == {'scope/got', 'scope/made', 'scope/given'}
    assert {v.op.name for v in built.slots} == {
        'scope/%s/Momentum' % name for name in ('got', 'made', 'given')}
    for variable in built.variables:
        assert variable.initializer.device == expected


def test_balanced_takes_the_device_with_the_fewest_bytes():
    def make():
        return [tf.get_variable('a', [10]),                   # 40 bytes: cpu:0, the first of equals
                tf.get_variable('b', [4, 5], tf.float64),     # 160: cpu:1
                tf.Variable(tf.zeros([6]), name='c'),         # 24: cpu:2
                tf.get_variable('d', [1]),                    # 4: cpu:2 (24 is the fewest)
                tf.get_variable('e', [1], tf.float16, initializer=tf.ones_initializer()),  # 28: 2
                tf.Variable(lambda: tf.zeros([3, 3]), name='f'),                  # 30: cpu:2
                tf.get_variable('g', initializer=np.zeros([2], np.float32)),      # 40: cpu:0
                tf.get_variable('h', [1])]                                        # 48: cpu:0
    built = build(make, 3, variables=VariablePlacement('balanced'))
    places = {name: int(device[-1]) for name, device in devices_of_variables().items()
              if '/' not in name}
    assert places == {'a': 0, 'b': 1, 'c': 2, 'd': 2, 'e': 2, 'f': 2, 'g': 0, 'h': 0}
    assert bytes_on(built) == dict(zip(CPUS, [40 + 8 + 4, 160, 24 + 4 + 2 + 36]))
    assert built.placement.devices() == CPUS
    for slot in built.slots:
        assert places[slot.op.name.split('/')[0]] == int(slot.device[-1])


def test_what_belongs_to_no_variable_is_beside_balanced_ones():
    built = build(lambda: [tf.get_variable('a', [250000]), tf.get_variable('b', [125000])],
                  ['/gpu:0', '/gpu:2'], variables=VariablePlacement('balanced'))
    assert built.placement.main == '/device:CPU:0'  # for what belongs to no single variable
    assert built.loss.device == '/device:CPU:0'
    assert [gradient.device for gradient, _ in built.gradients] == [
        '/device:GPU:0', '/device:GPU:2']


@pytest.mark.parametrize('device, text', [
    (3, "device=3: expected None, a device's name, with a number, or 'balanced', 'repl"),
    ('replicate', "device='replicate': expected None, a device's name, with a number, or"),
    (lambda op: '/cpu:0', 'device=<function ')])
def test_what_is_no_place_of_variables(device, text):
    with pytest.raises(InvalidArgumentError, match='^' + re.escape(text)):
        VariablePlacement(device)


@pytest.mark.parametrize('device, num_towers, there', [
    ('/cpu:2', 2, '/cpu:0 to /cpu:1'), ('/cpu:1', 1, '/cpu:0 to /cpu:0')])
def test_a_variable_device_that_the_session_will_not_have(graph, device, num_towers, there):
    def build(check=True):
        return build_towers(
            lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), np.ones([4], np.float32),
            tf.train.GradientDescentOptimizer(1.), towers.resolve_devices(num_towers, check),
            variables=VariablePlacement(device))
    with pytest.raises(DeviceError) as caught:
        build()
    assert str(caught.value) == (
        'VariablePlacement(%r): the session of these towers has %s. Name one of them; or pass '
        "resolve_devices(…, check=False) and a config with device_count={'CPU': %d}." % (
            device, there, int(device[-1]) + 1))
    assert not graph.get_operations()
    assert build(check=False).variables[0].device == '/device:CPU:' + device[-1]
