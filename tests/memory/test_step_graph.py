"""What a step runs, and how large its tensors are."""

import tensorflow.compat.v1 as tf

from towers.memory.step_graph import StepGraph


def test_what_is_computed_of_constants_and_shapes_is_folded():
    x = tf.placeholder(tf.float32, [3, 4])
    shape = tf.raw_ops.Shape(input=x, name='shape')
    zeros = tf.fill(shape, 0., name='zeros')
    drawn = tf.random_uniform([3, 4], name='drawn')
    step = StepGraph([x + zeros + drawn])
    assert step.by_name['shape'].folded and step.by_name['zeros'].folded
    assert step.by_name['zeros'].sizes == [48]
    assert not step.by_name['drawn/RandomUniform'].folded


def test_a_size_that_is_not_known_is_that_of_the_largest_input_and_named():
    x = tf.placeholder(tf.int32, [100])
    step = StepGraph([tf.unique(x, name='unique')[0]])
    assert step.by_name['unique'].sizes == [400, 400]  # the second is known: an index each
    assert step.unknown == ['unique']


def test_what_is_only_waited_for_is_idle():
    x = tf.placeholder(tf.float32, [1000])
    waited = tf.square(x, name='waited')
    state = tf.get_variable('v', [], use_resource=True)
    with tf.control_dependencies([waited]):
        update = tf.assign_add(state, 1.)
    step = StepGraph([update.op])
    assert step.by_name['waited'].idle and step.by_name['waited'].sizes == [0]
    assert [node.name for node in step.by_name['waited'].controls] == [x.op.name]
    assert not step.by_name[update.op.name].idle


def test_what_takes_or_awaits_a_constant_waits_for_what_that_waits_for():
    x = tf.placeholder(tf.float32, [], 'x')
    with tf.control_dependencies([tf.sqrt(x, name='first')]):
        constant = tf.constant(2., name='constant')
    with tf.control_dependencies([tf.negative(constant, name='folded')]):
        awaits = tf.exp(x, name='awaits')
    step = StepGraph([awaits, tf.add(constant, x, name='takes')])
    assert step.by_name['folded'].folded
    for name in ('awaits', 'takes'):
        assert [node.name for node in step.by_name[name].controls] == ['first']


def test_a_check_is_run_though_nobody_takes_it():
    x = tf.placeholder(tf.float32, [1000])
    with tf.control_dependencies([tf.debugging.check_numerics(x, 'bad', name='check')]):
        done = tf.no_op()
    assert not StepGraph([done]).by_name['check'].idle


def test_the_update_of_a_reference_variable_is_no_idle_one():
    values = tf.placeholder(tf.float32, [100])
    variable = tf.get_variable('v', [100], use_resource=False)
    step = StepGraph([tf.group(tf.assign_sub(variable, tf.exp(values)), name='step')])
    assert not step.by_name['Exp'].idle and step.by_name['Exp'].sizes == [400]
    assert not step.by_name['AssignSub'].idle
