"""What brings something into a model that may differ by worker, and what computes alone."""

import pytest
import tensorflow.compat.v1 as tf

from towers.cluster.may_differ_across_workers import CommonValues

SOURCES = {
    'a Python function': lambda value: tf.py_func(lambda x: x, [value], tf.float64),
    'a stateless Python function': lambda value: tf.py_func(
        lambda x: x, [value], tf.float64, stateful=False),
    'random numbers': lambda value: tf.random_normal([], value, dtype=tf.float64),
    'their stateless twins': lambda value: tf.random.stateless_normal(
        [], tf.stack([1, tf.cast(value, tf.int32)])),
    'a file': lambda value: tf.read_file(tf.as_string(value)),
    'the time': lambda value: tf.timestamp(),
    'a feed': lambda value: tf.placeholder(tf.float64, []),
    'a shard': lambda value: tf.placeholder_with_default(value, []),
    'a pipeline': lambda value: tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(1.)).get_next(),
    'a queue': lambda value: tf.FIFOQueue(3, tf.float64).dequeue(),
    'a table': lambda value: tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2.]), 0.).lookup(tf.cast(value, tf.int32)),
    'a stage': lambda value: tf.raw_ops.Unstage(dtypes=[tf.float64])[0],
    'a function': lambda value: tf.function(
        lambda x: x + tf.py_func(lambda y: y, [x], tf.float64))(value)}

COMPUTATIONS = {
    'arithmetic': lambda value: tf.clip_by_value(value * 2., -1., 1.),
    'a look': lambda value: tf.check_numerics(tf.Print(value, [value]), 'value'),
    'a loop': lambda value: tf.while_loop(
        lambda turn, _: turn < 3, lambda turn, total: (turn + 1, total * value), [0, value])[1],
    'a branch': lambda value: tf.cond(value > 1., lambda: value * 2., lambda: value),
    'a write in a branch': lambda value: tf.cond(
        value > 1., lambda: written(value), lambda: value),
    'a function': lambda value: tf.function(lambda x: x * 2.)(value)}


def written(value):
    state = [each for each in tf.global_variables() if each.op.name == 'state'][0]
    with tf.control_dependencies([state.assign(value)]):
        return state.read_value()


def brings_in(make):
    """The types of operations that bring something in, of those that compute a tensor."""
    value = tf.constant(3., tf.float64)
    tf.get_variable('state', [], tf.float64, use_resource=True)
    stack, seen, found = [make(value).op], set(), []
    values = CommonValues(tf.get_default_graph())  # which now has all functions
    while stack:
        op = stack.pop()
        if op.name in seen or op.type == 'VarHandleOp':
            continue
        seen.add(op.name)
        if values.brings_in(op):
            found.append(op.type)
        stack += [tensor.op for tensor in op.inputs]
    return found


@pytest.fixture(params=['v1', 'v2'])
def control_flow(request):
    was_v2 = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if request.param == 'v2' else tf.disable_control_flow_v2)()
    yield
    (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()


@pytest.mark.parametrize('name', sorted(SOURCES))
def test_what_brings_something_in(name):
    assert brings_in(SOURCES[name])


@pytest.mark.parametrize('name', sorted(COMPUTATIONS))
def test_what_computes_from_its_inputs_alone(name, control_flow):
    assert brings_in(COMPUTATIONS[name]) == []


def test_a_branch_that_calls_a_python_function_brings_something_in(control_flow):
    assert brings_in(lambda value: tf.cond(
        value > 1., lambda: tf.py_func(lambda x: x, [value], tf.float64), lambda: value))
