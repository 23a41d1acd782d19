"""Variables of a build do what a TF1 program expects of reference variables."""

import operator

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import check_against_one_device, run, sgd, switched

X = np.array([1., 2., 3., 6.])


def weight(name='w', shape=()):
    return tf.get_variable(name, shape, tf.float64, tf.ones_initializer())


def build(model_fn, data=X, optimizer=None, devices=2, **options):
    return towers.build_towers(model_fn, data, optimizer or sgd(), devices, 'mean', **options)


@pytest.mark.parametrize('change, loss', first_fast(2, [
    (operator.iadd, 9.), (operator.ipow, 3.), (operator.isub, -3.), (operator.imul, 6.),
    (operator.itruediv, 1.5)]))
def test_an_operator_in_place_makes_a_tensor(change, loss):
    """charlesq34/pointnet: `biases += tf.constant(np.eye(3).flatten())`."""
    built = build(lambda x: tf.reduce_mean(x * change(weight(), tf.constant(2., tf.float64))))
    assert run(built, built.loss) == loss
    assert [variable.op.name for variable in tf.trainable_variables()] == ['w']


class Lookahead(tf.train.GradientDescentOptimizer):
    """Zhang et al. 2019: slow weights, which begin as the weights."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        variables = [variable for _, variable in grads_and_vars]
        for variable in variables:
            self._get_or_make_slot(variable, variable.initialized_value(), 'slow', 'Lookahead')
        with tf.control_dependencies([super().apply_gradients(grads_and_vars, global_step, name)]):
            return tf.group(*[tf.assign_add(slow, .5 * (variable.read_value() - slow))
                              for variable in variables
                              for slow in [self.get_slot(variable, 'slow')]])


def test_slots_may_begin_with_the_initialized_value():
    built = build(lambda x: tf.reduce_mean(x * weight()), optimizer=Lookahead(1.))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(built.variables + built.slots) == [1. - 3., 1. - 1.5]


def branch_in_a_loop(x):
    w = weight(shape=[3])

    def of_example(row):
        return tf.cond(row[0] > 0., lambda: tf.reduce_sum(row * w), lambda: 2. * tf.reduce_sum(w))
    return tf.reduce_mean(tf.map_fn(of_example, x))


def rows_in_a_branch_in_a_loop(x):
    w = weight(shape=[3, 2])

    def of_example(row):
        ids = tf.cast(row > 0., tf.int32)
        return tf.cond(row[0] > 0., lambda: tf.reduce_sum(tf.nn.embedding_lookup(w, ids)),
                       lambda: 2. * tf.reduce_sum(tf.gather_nd(w, ids[:, None]) ** 2))
    return tf.reduce_mean(tf.map_fn(of_example, x))


# The variables are on '/cpu:0'.
@pytest.mark.slow
@pytest.mark.parametrize('devices', first_fast(1, [['/cpu:1', '/cpu:2'], 2]))
@pytest.mark.parametrize('copies', first_fast(1, ['clone', 'reuse']))
@pytest.mark.parametrize('model_fn', first_fast(1, [
    rows_in_a_branch_in_a_loop, branch_in_a_loop]))
def test_a_branch_in_a_loop_of_control_flow_v1(model_fn, copies, devices):
    data = np.random.RandomState(0).randn(8, 3)
    with switched('control_flow_v2', False), switched('resource_variables', False):
        check_against_one_device(
            model_fn, [data], num_towers=devices, reduction='mean', copies=copies)


@pytest.mark.parametrize('use', [lambda v, x: tf.reduce_mean(x * v),
                                 lambda v, x: tf.reduce_mean(x) * tf.assign(v, 3.)])
def test_the_handle_of_a_variable_by_its_name_is_refused(graph, use):
    """leela-zero takes its weights so."""
    def model_fn(x):
        weight()
        return use(tf.get_default_graph().get_tensor_by_name('w:0'), x)
    with pytest.raises(towers.SharedVariableError,
                       match="^the program takes the tensor 'w:0' by its name, which is the handle "
                             'of a variable here.*take the variable itself, as tf.get_variable'):
        build(model_fn)
    assert graph.get_tensor_by_name('w:0').dtype == tf.resource  # it is as before


def test_other_tensors_are_found_by_their_names():
    def model_fn(x):
        tf.multiply(x, weight(), 'product')
        return tf.reduce_mean(tf.get_default_graph().get_tensor_by_name('product:0'))
    built = build(model_fn)
    assert run(built, built.loss) == 3.
