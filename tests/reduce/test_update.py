"""towers.update: one update of the shared variables, after all that reads them, and its slots."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

from sample_models import switched
from towers import LossScale, Numerics, build_towers, session_config
from towers.errors import InvalidArgumentError
from towers.reduce.update import call_transform


class BertOptimizer(tf.train.Optimizer):
    """As google-research/bert has it: slots by get_variable, no step, no use of the base class."""

    def __init__(self):
        super(BertOptimizer, self).__init__(False, 'BertOptimizer')

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, param in grads_and_vars:
            if grad is None or param is None:
                continue
            m = tf.get_variable(param.op.name + '/adam_m', param.shape.as_list(),
                                param.dtype.base_dtype, trainable=False,
                                initializer=tf.zeros_initializer())
            next_m = 0.5 * m + 0.5 * grad
            assignments.extend([param.assign(param - next_m), m.assign(next_m)])
        return tf.group(*assignments, name=name)


@pytest.mark.parametrize('optimizer, reuse', [
    (lambda: tf.train.MomentumOptimizer(1., 0.9), tf.AUTO_REUSE), (BertOptimizer, True)],
                         ids=['momentum', 'bert'])
def test_slots_are_made_under_a_scope_whose_reuse_is_on(graph, optimizer, reuse):
    def made():
        return tf.get_variable('a', [2], initializer=tf.ones_initializer())
    with tf.variable_scope('m'):
        variable = made()
    with tf.variable_scope('m', reuse=reuse):
        scope = tf.get_variable_scope()
        built = build_towers(lambda x: tf.reduce_mean(x) * tf.reduce_sum(made()), tf.ones([4]),
                             optimizer(), 2, 'mean')
        assert tf.get_variable_scope() is scope and bool(scope.reuse)
    is_bert = optimizer is BertOptimizer
    assert [slot.op.name for slot in built.slots] == [
        'm/m/a/' + ('adam_m' if is_bert else 'Momentum')]
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(variable).tolist() == ([.5, .5] if is_bert else [0., 0.])


def test_gradients_that_no_optimizer_takes(graph):
    v, w, other = [tf.get_variable(name, [2]) for name in ('a', 'b', 'other')]
    of_v, of_w = tf.ones([2]), (tf.ones([2]), w)
    with tf.Graph().as_default():
        foreign = tf.ones([2])
    for given in ('x', np.ones([2], np.float32), tf.ones([3]), tf.ones([2], tf.int32), foreign,
                  tf.IndexedSlices(tf.ones([1], tf.float64), tf.constant([0]))):
        with pytest.raises(InvalidArgumentError, match="as the gradient of 'a': expected a tensor "
                           r'or an IndexedSlices of this graph, of shape \(2,\) and dtype float32'):
            call_transform(lambda pairs, given=given: [(given, v), of_w], [(of_v, v), of_w])
    for pairs, text in (([(of_v, v), (of_v, v)], 'each once'), (None, 'each once'),
                        ([(of_v, other)], 'each once'), ([of_v], 'each once')):
        with pytest.raises(InvalidArgumentError, match=text):
            call_transform(lambda unused, pairs=pairs: pairs, [(of_v, v), of_w])
    fine = [(of_v, v), (None, w)]
    assert call_transform(lambda unused: fine, [(of_v, v), of_w]) == fine


# ---- who counts the steps -----------------------------------------------------------------------

def reads_plainly(step):
    return 0. * tf.cast(step, tf.float32)


def reads_in_a_cond(step):
    return tf.cond(step < 3, lambda: 0. * tf.cast(step, tf.float32), lambda: 0.)


class Reads(BertOptimizer):
    """Leaves the step to its caller and reads it, as BERT's does for its warm-up."""

    def __init__(self, read):
        super(Reads, self).__init__()
        self._read = read

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        shift = self._read(tf.train.get_global_step())
        return super(Reads, self).apply_gradients([(g + shift, v) for g, v in grads_and_vars])


class EveryOther(tf.train.GradientDescentOptimizer):
    """Applies every second time it is called, and counts the step then."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        calls = tf.get_variable('calls', [], tf.int32, tf.zeros_initializer(), trainable=False)

        def apply():
            with tf.control_dependencies([super(EveryOther, self).apply_gradients(
                    grads_and_vars, global_step)]):
                return tf.constant(True)
        counted = tf.assign_add(calls, 1)
        return tf.group(tf.cond(tf.equal(counted % 2, 0), apply, lambda: tf.constant(False)))


COUNTING = [('plain', lambda: Reads(reads_plainly), 6), ('cond', lambda: Reads(reads_in_a_cond), 6),
            ('adam', lambda: tf.train.AdamOptimizer(0.1), 6),
            ('every other', lambda: EveryOther(1.), 3)]


@pytest.mark.slow
@pytest.mark.parametrize('v2, use_resource, scaled, make, expected', [
    kind + each[1:] for each in COUNTING for kind in [
        (False, False, True), (True, True, False), (True, True, True)]
    if kind[1] and kind[2] or each[0] in ('cond', 'every other')])
def test_every_step_is_counted_once(graph, make, expected, v2, use_resource, scaled):
    """Six steps, of which under a loss scale the fourth overflows: skipped, and counted."""
    with switched('control_flow_v2', v2):
        tf.get_variable_scope().set_use_resource(use_resource)
        step = tf.train.get_or_create_global_step()
        x = tf.placeholder(tf.float32, [2])
        w = []

        def model_fn(x):
            w[:] = [tf.get_variable('w', [], initializer=tf.ones_initializer())]
            return tf.reduce_mean(x * w[0])
        built = build_towers(model_fn, x, make(), 2, global_step=step,
                             numerics=Numerics(loss_scale=LossScale(8.) if scaled else None))
        with tf.Session(config=session_config(2)) as session:
            session.run(tf.global_variables_initializer())
            for number in range(6):
                bad = scaled and number == 3
                session.run(built.train_op, {x: [float('inf') if bad else 1., 1.]})
            # Every second update is of the calls that were not skipped: 2, 4, and the skipped one.
            if scaled and expected == 3:
                expected = 2 + 1
            assert session.run(step) == expected
            assert session.run(w[0]) < 1.


class Wrapping(tf.train.Optimizer):
    def __init__(self, inner):
        super().__init__(False, 'Wrapping')
        self.inner = inner

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self.inner.apply_gradients(grads_and_vars, global_step, name)


def rate_in_float64():
    return tf.placeholder_with_default(np.float64(.5), [])


def rate_by_function():
    return lambda: .5


@pytest.mark.parametrize('make_rate', [rate_in_float64, rate_by_function])
@pytest.mark.parametrize('wraps', first_fast(1, [True, False]))
def test_sparse_gradients_of_gradient_descent_at_a_rate_of_any_kind(make_rate, wraps):
    """zhougr1993/DeepInterestNetwork feeds a rate in float64."""
    def model_fn(ids):
        table = tf.get_variable('table', [4, 1], initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.nn.embedding_lookup(table, ids))
    optimizer = tf.train.GradientDescentOptimizer(make_rate())
    methods = dict(vars(optimizer))
    if wraps:
        optimizer = Wrapping(optimizer)
    built = build_towers(model_fn, np.int32([0, 1, 1, 3]), optimizer, 2, 'mean')
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        [table] = session.run(built.variables)
    np.testing.assert_allclose(table[:, 0], [.875, .75, 1., .875])
    assert vars(optimizer.inner if wraps else optimizer).keys() == methods.keys()
