"""towers.update: one update of the shared variables, after all that reads them, and its slots."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from sample_models import switched
from towers import LossScale, Numerics, build_towers, session_config
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import step_operations
from towers.placement.variable_device import Placement
from towers.reduce.update import apply_update, checked_transform

CPUS = ('/device:CPU:0', '/device:CPU:1')


@pytest.fixture(params=[True], ids=['resource'])
def resource(request, graph):
    tf.get_variable_scope().set_use_resource(request.param)
    return request.param


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


def two_variables(placement):
    """Variables of ones, made as the towers make them."""
    variables = []
    for name in ('a', 'b/kernel'):
        with placement.scope():
            variables.append(tf.get_variable(name, [2], initializer=tf.ones_initializer()))
        placement.note(variables[-1])
    return variables


def gradients_of(variables):
    return [(tf.constant([1., 2.]) * (i + 1.), v) for i, v in enumerate(variables)]


def run(step, variables, times=1):
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(times):
            session.run(step)
        return [session.run(v).tolist() for v in variables]


def update(optimizer, placement, variables, global_step=None, after=()):
    return apply_update(optimizer, gradients_of(variables), global_step, placement, variables,
                        list(after))[:2]


def test_nothing_stands_between_the_sum_and_the_update(resource):
    """No copy: what updates a variable reads the AddN itself, on the variable's device."""
    def model_fn(x):
        w = tf.get_variable('w', [3, 2])
        return tf.reduce_mean(tf.square(tf.matmul(x, w)))
    built = build_towers(model_fn, tf.ones([8, 3]), tf.train.MomentumOptimizer(0.1, 0.9), 4)
    kind = 'ResourceApplyMomentum' if resource else 'ApplyMomentum'
    applied, = [op for op in step_operations([built.train_op]) if op.type == kind]
    gradient, = [tensor for tensor in applied.inputs if tensor.shape.as_list() == [3, 2]
                 and tensor.dtype == tf.float32]
    assert gradient.op.type == 'AddN' and len(gradient.op.inputs) == 4
    assert gradient.op.device == applied.device == '/device:CPU:0'
    assert [[tower.index for tower in built.towers if tower.has(tensor.op.name)]
            for tensor in gradient.op.inputs] == [[0], [1], [2], [3]]


@pytest.mark.parametrize('optimizer,slots', [
    (lambda: tf.train.AdamOptimizer(1.), ['beta1_power', 'beta2_power', 'a/Adam', 'a/Adam_1',
                                          'b/kernel/Adam', 'b/kernel/Adam_1']),
    (BertOptimizer, ['a/adam_m', 'b/kernel/adam_m'])], ids=['adam', 'bert'])
@pytest.mark.parametrize('where', ['/cpu:1', 'balanced'])
def test_slots_go_beside_their_variables(resource, where, optimizer, slots):
    placement = Placement(where, CPUS)
    variables = two_variables(placement)
    with tf.device('/gpu:3'):  # what is around plays no part
        step, made = update(optimizer(), placement, variables)
    assert isinstance(step, tf.Operation)
    assert sorted(slot.op.name for slot in made) == sorted(slots)
    assert tf.global_variables() == variables + made
    for slot in made:
        owner = variables[0] if slot.op.name.startswith('a/') else variables[1]
        expected = variables[0].device if 'power' in slot.op.name else owner.device
        assert slot.device == expected, slot.op.name
    if where == 'balanced':
        assert [v.device[-1] for v in variables] == ['0', '1']
    writes = [op for op in tf.get_default_graph().get_operations()
              if op.type.startswith(('Apply', 'ResourceApply'))]
    assert all(op.device == op.inputs[0].device for op in writes)


def test_one_step_of_an_optimizer_that_forgets_the_global_step(resource):
    placement = Placement(None, CPUS)
    variables = two_variables(placement)
    global_step = tf.train.get_or_create_global_step()
    step, slots = update(BertOptimizer(), placement, variables, global_step)
    # m: 0.5 g, then 0.75 g; w: 1 - 0.5 g - 0.75 g
    assert run(step, variables + slots + [global_step], times=2) == [
        [1. - 1.25, 1. - 2.5], [1. - 2.5, 1. - 5.], [0.75, 1.5], [1.5, 3.], 2]


def test_what_comes_first_reads_the_weights_of_before(resource):
    placement = Placement(None, CPUS)
    variables = two_variables(placement)
    loss = tf.reduce_sum(variables[0])
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer())
    batch_norm = tf.assign_add(count, 1.)
    step, _ = update(tf.train.GradientDescentOptimizer(1.), placement, variables,
                     after=[loss, batch_norm])
    with tf.Session(config=session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        for expected in (2., -1., -4.):
            assert session.run([loss, step])[0] == expected
        assert session.run(count) == 3.  # it rides on the step
    writes = [op for op in step_operations([step])
              if op.type in ('ApplyGradientDescent', 'ResourceApplyGradientDescent')]
    assert len(writes) == 2
    for op in writes:
        assert {loss.op.name, batch_norm.op.name} <= {
            before.name for before in step_operations([op])}


@pytest.mark.parametrize('optimizer, reuse', [
    (lambda: tf.train.MomentumOptimizer(1., 0.9), tf.AUTO_REUSE), (BertOptimizer, True)],
                         ids=['momentum', 'bert'])
def test_under_a_scope_whose_reuse_is_on(resource, optimizer, reuse):
    placement = Placement('balanced', CPUS)
    with tf.variable_scope('m'):
        variables = two_variables(placement)
    with tf.variable_scope('m', reuse=reuse):
        scope = tf.get_variable_scope()
        step, slots = update(optimizer(), placement, variables)
        assert tf.get_variable_scope() is scope and bool(scope.reuse)
    name = type(optimizer()).__name__.replace('Optimizer', '')
    suffix = {'Momentum': 'Momentum', 'Bert': 'adam_m'}[name]
    assert [slot.op.name for slot in slots] == ['m/m/a/' + suffix, 'm/m/b/kernel/' + suffix]
    assert [slot.device for slot in slots] == list(CPUS)
    rate = 1. if name == 'Momentum' else 0.5
    assert run(step, variables) == [[1. - rate, 1. - 2. * rate], [1. - 2. * rate, 1. - 4. * rate]]


# ---- the user's transformation ------------------------------------------------------------------


def test_clipping_by_the_global_norm(resource):
    placement = Placement('/cpu:1', CPUS)
    variables = two_variables(placement)

    def clip(pairs):
        gradients, their_variables = zip(*pairs)
        return list(zip(tf.clip_by_global_norm(gradients, 5.)[0], their_variables))
    pairs = checked_transform(clip, gradients_of(variables), placement)
    assert [v for _, v in pairs] == variables
    assert all(gradient.op.name.startswith('transform_gradients/') for gradient, _ in pairs)
    step = apply_update(tf.train.GradientDescentOptimizer(1.), pairs, None, placement,
                        variables, []).train_op
    # The norm of 1, 2, 2, 4 is 5: nothing to clip. Twice as much is halved.
    assert run(step, variables) == [[0., -1.], [-1., -3.]]
    doubled = checked_transform(lambda pairs: [(2. * gradient, v) for gradient, v in pairs],
                                gradients_of(variables), placement)
    assert all(gradient.device == '/device:CPU:1' for gradient, _ in doubled)
    again = checked_transform(clip, doubled, placement)
    assert run([], [again[0][0]]) == [[1., 2.]]


def test_what_a_transformation_must_not_return(resource):
    placement = Placement(None, CPUS)
    variables = two_variables(placement)
    gradients = gradients_of(variables)
    other = tf.get_variable('other', [2])
    for wrong in (None, [], 3, gradients[0], [(gradients[0][0], 'a')], [(gradients[0][0], other)],
                  [gradients[0][0]], zip(gradients), [gradients[0] + (1,)]):
        with pytest.raises(InvalidArgumentError) as caught:
            checked_transform(lambda unused, wrong=wrong: wrong, gradients, placement)
        assert str(caught.value).startswith('transform_gradients returned ')
        assert str(caught.value).endswith('expected a list of (gradient, variable) pairs with '
                                          'variables among those it was given, each once.')


def test_gradients_that_no_optimizer_takes(resource):
    placement = Placement(None, CPUS)
    v, w = variables = two_variables(placement)
    (of_v, _), of_w = gradients_of(variables)
    with tf.Graph().as_default():
        foreign = tf.ones([2])
    for given in ('x', np.ones([2], np.float32), tf.ones([3]), tf.ones([2], tf.int32), foreign,
                  tf.IndexedSlices(tf.ones([1], tf.float64), tf.constant([0]))):
        with pytest.raises(InvalidArgumentError, match="as the gradient of 'a': expected a tensor "
                           r'or an IndexedSlices of this graph, of shape \(2,\) and dtype float32'):
            checked_transform(lambda pairs, given=given: [(given, v), of_w], [(of_v, v), of_w],
                              placement)
    for pairs, text in (([(of_v, v), (of_v, v)], 'each once'),
                        ([(None, v), (None, w)], 'None for every gradient')):
        with pytest.raises(InvalidArgumentError, match=text):
            checked_transform(lambda unused, pairs=pairs: pairs, [(of_v, v), of_w], placement)
    fine = [(tf.ones([2]), v), (None, w)]
    assert checked_transform(lambda unused: fine, [(of_v, v), of_w], placement) == fine


# ---- who counts the steps -----------------------------------------------------------------------

def reads_plainly(step):
    return 0. * tf.cast(step, tf.float32)


def reads_in_a_cond(step):
    return tf.cond(step < 3, lambda: 0. * tf.cast(step, tf.float32), lambda: 0.)


def reads_in_a_case(step):
    return tf.case([(step < 1, lambda: 0.), (step < 3, lambda: 0. * tf.cast(step, tf.float32))],
                   default=lambda: 0. * tf.cast(step, tf.float32))


def reads_in_a_loop(step):
    return tf.while_loop(lambda x: x < 1., lambda x: x + 1. + 0. * tf.cast(step, tf.float32),
                         [tf.constant(0.)]) - 1.


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


class CountsByItself(BertOptimizer):
    """Counts the global step that it was not given, by an operation of long before."""

    def __init__(self):
        super(CountsByItself, self).__init__()
        self._count = tf.assign_add(tf.train.get_or_create_global_step(), 1)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return tf.group(super(CountsByItself, self).apply_gradients(grads_and_vars), self._count)


COUNTING = [(name, lambda read=read: Reads(read), 6) for name, read in (
    ('plain', reads_plainly), ('cond', reads_in_a_cond), ('case', reads_in_a_case),
    ('loop', reads_in_a_loop))] + [
        ('sgd', lambda: tf.train.GradientDescentOptimizer(1.), 6),
        ('adam', lambda: tf.train.AdamOptimizer(0.1), 6), ('bert', BertOptimizer, 6),
        ('every other', lambda: EveryOther(1.), 3), ('by itself', CountsByItself, 6)]


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


def test_an_update_that_is_no_operation(resource):
    class Returns(tf.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            return None
    placement = Placement(None, CPUS)
    with pytest.raises(InvalidArgumentError, match='returned None: expected the operation'):
        update(Returns(1.), placement, two_variables(placement))
