"""The plan: its text, line by line, and that it fits a screen."""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import linear, momentum, sgd, two_layers
from case_marks import first_fast


def plan_of(model_fn=two_layers, size=8, optimizer=None, devices=2, **options):
    with tf.Graph().as_default():
        return towers.build_towers(model_fn, samples.vectors(size, options.pop('dtype', 'float64')),
                                   optimizer and optimizer(),
                                   towers.resolve_devices(devices, check=False), **options).plan


def normed(x, y):
    net = slim.fully_connected(x, 5, normalizer_fn=slim.batch_norm,
                               weights_regularizer=slim.l2_regularizer(0.1))
    tf.get_variable('unused', [2])
    return linear(x, y) + tf.reduce_mean(net) * tf.Variable(1., name='scale')


@pytest.mark.slow
def test_the_whole_text(monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    plan = plan_of(normed, 8, sgd, ['/gpu:2', '/cpu:0'], dtype='float32', regularization='add')
    # 6 x 5 weights, 3 x 5 of batch norm, 6 x 3 of the kernel, 2 unused, 1 scale
    text = re.sub(r'\(\d\d\n', '(43\n', str(plan))  # versions of TensorFlow differ in the number
    assert text == '''2 towers, batch 8 = 2 x 4
  tower  device        examples  does alone
  0      /gpu:2        4         batch-norm updates
  1      /cpu:0        4         -
  towers           1 call of the model function, 1 copy of its graph
  variables        7 (5 trainable), 66 parameters, 0.3 kB
  variables on     /cpu:0
  session_config   TensorFlow's choice of intra-op and TensorFlow's choice of inter-op threads; GPU
                   memory as it is needed
  optimizer        GradientDescentOptimizer
  reduction        sum: 2 x the gradient of the batch's mean loss
  learning rate    0.5; on the sum, steps as 2 x 0.5 = 1 would on the mean
  one device       proven, if 4 in 1 operation ('fully_connected/BatchNorm/Reshape_1/shape') is the
                   static size of a shard, and no other constant was computed from it (with a batch
                   [None, ...] this condition falls away), but for 1 batch norm of each tower's
                   shard (batch_norm='sync' takes the statistics of the whole batch): the loss is a
                   mean over the examples, and the update takes 2 times its gradient (43 operations)
  regularization   1 registered loss added, counted once
  batch norm       2 update ops of tower 0 ride on the train op
  updated by       all towers together: 5 trained; tower 0 alone: 2 averages and counters
  no gradient      unused'''
    assert plan.batch_size == 8 and plan.reduction == 'sum' and plan.remainder == 'error'
    assert plan.line('nothing') is None
    for label in (['batch norm'], None, 0):
        with pytest.raises(towers.InvalidArgumentError, match="^label=.*: expected one of the "
                           "words in front of a line, such as 'towers', 'variables', "):
            plan.line(label)


def counting(x, y):
    """A loss that reads an average, with a count of examples and a counter of a metric."""
    kernel = tf.get_variable('kernel', [6, 3])
    tf.get_variable('unused', [2])
    constant = tf.get_variable('constant', [], trainable=False)
    average = tf.get_variable('average', [3], trainable=False)
    seen = tf.get_variable('seen', [], trainable=False)
    net = tf.matmul(x, kernel) * constant
    updates = [tf.assign(average, .9 * average.read_value() + .1 * tf.reduce_mean(net, 0)),
               tf.assign_add(seen, tf.cast(tf.shape(x)[0], tf.float32))]
    loss = tf.reduce_mean(tf.square(net - average))
    return towers.ModelOutput(loss, metrics={'loss': tf.metrics.mean(loss, name='counted')},
                              updates=updates)


def any_number_of_examples():
    return tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.float32, [None, 3])


@pytest.mark.slow
def test_why_variables_have_their_roles_and_operations_wait():
    with tf.Graph().as_default():
        built = towers.build_towers(counting, any_number_of_examples(), sgd(), 2)
        plan = built.plan
    roles = {each.variable: (each.writer, each.reason) for each in plan.variable_roles}
    assert roles == {
        'kernel': ('all towers together', 'the loss trains it, since it is trainable'),
        'unused': ('nobody', 'no loss depends on it'),
        'constant': ('nobody', 'it is not trained, and no operation of a step writes it'),
        'average': ('tower 0 alone', 'it is a moving average of a statistic of the examples'),
        'seen': ('every tower, one after the other',
                 'a sum over the examples, or a count of them, is added to it'),
        'counted/total': ('every tower adds to', 'it is a counter that only update_ops of metrics '
                                                 'write'),
        'counted/count': ('every tower adds to', 'it is a counter that only update_ops of metrics '
                                                 'write')}
    graph = built.loss.graph
    for wait in plan.waits:
        operation = graph.get_operation_by_name(wait.operation)
        assert graph.get_operation_by_name(wait.awaited) in operation.control_inputs, wait
    reasons = {wait.reason for wait in plan.waits}
    assert 'tower 0 writes variable seen before it' in reasons
    assert 'it takes variable counted/total in its turn, after the tower before' in reasons
    awaited_reads = [wait.awaited for wait in plan.waits
                     if wait.reason == 'it reads variable average before this write']
    assert 'tower_1/sub/ReadVariableOp' in awaited_reads
    text = plan.explain()
    assert ('\n  tower 0 alone: it is a moving average of a statistic of the examples\n'
            '    average\n') in text
    assert '\n    AssignAddVariableOp: tower 0 writes variable seen before it\n' in text
    assert '    counted/count and 1 more\n' in plan.explain(most_names=1)
    with pytest.raises(towers.InvalidArgumentError, match='^most_names=0: expected a whole'):
        plan.explain(0)


@pytest.mark.parametrize('update_ops, devices, optimizer, writer, reason', first_fast(1, [
    ('all', 2, sgd, 'every tower', "update_ops='all' says so"),
    ('none', 2, sgd, 'nobody', "update_ops='none' says so"),
    ('first', 1, sgd, 'tower 0 alone', 'one tower does all of the batch'),
    ('first', 2, lambda: None, 'nobody',
     'update ops alone write it, and without an optimizer no step runs them')]))
def test_roles_that_need_no_proof(update_ops, devices, optimizer, writer, reason):
    with tf.Graph().as_default():
        plan = towers.build_towers(counting, any_number_of_examples(), optimizer(), devices,
                                   update_ops=update_ops).plan
    [average] = [each for each in plan.variable_roles if each.variable == 'average']
    assert (average.writer, average.reason) == (writer, reason)
    is_nobody_counted = 'nobody: ' in (plan.line('updated by') or '')
    assert is_nobody_counted == (writer == 'nobody')


def inline_counter(x, y):
    """A loss that uses the new value of a counter, which the forward pass writes."""
    step = tf.get_variable('step', [], trainable=False)
    return tf.reduce_mean(tf.matmul(x, tf.get_variable('kernel', [6, 3]))) * tf.assign_add(step, 1.)


@pytest.mark.slow
def test_a_write_whose_new_value_is_used_is_tower_0s_where_nobody_updates():
    with tf.Graph().as_default():
        plan = towers.build_towers(inline_counter, any_number_of_examples(), sgd(), 2,
                                   update_ops='none').plan
    [step] = [each for each in plan.variable_roles if each.variable == 'step']
    assert (step.writer, step.reason) == ('tower 0 alone', 'the forward pass uses its new value')


def long_names(x, y):
    for branch in range(5):
        scope = 'InceptionResnetV2/InceptionResnetV2/Repeat_1/block17_%d/Branch_1' % branch
        with tf.variable_scope(scope):
            kernel = tf.Variable(np.ones([6, 3]), name=scope + '/Conv2d_0b_1x7/weights')
            tf.get_variable('Conv2d_0b_1x7/weights/and/even/longer/than/that', [3])
    return samples.mean_squared_error(tf.matmul(x, kernel), y)


@pytest.mark.parametrize('num_towers, device, model_fn', [
    (12, '/job:worker/replica:0/task:%d/gpu:0', linear),
    pytest.param(12, '/gpu:%d', long_names, marks=pytest.mark.slow)], ids=['long devices', 'long names'])
def test_it_fits_a_screen(num_towers, device, model_fn):
    lines = str(plan_of(model_fn, num_towers * 2 + 1, momentum,
                        [device % index for index in range(num_towers)],
                        remainder='weight')).split('\n')
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    assert lines[0].startswith('%d towers, batch %d = ' % (num_towers, num_towers * 2 + 1))
    assert any(line.startswith('  no gradient') for line in lines) == (model_fn is long_names)
    assert '  ...' in lines


@pytest.mark.slow
def test_uneven_batches():
    assert str(plan_of(size=7, devices=3, remainder='weight')).startswith(
        '3 towers, batch 7 = 3 + 2 + 2\n')
    assert str(plan_of(size=20, devices=9, remainder='weight')).startswith(
        '9 towers, batch 20 = 2 x 3 + 7 x 2\n')
    assert str(plan_of(size=7, devices=3, remainder='drop')).startswith(
        '3 towers, batch 6 = 3 x 2\n')
    assert str(plan_of(devices=1)).startswith('1 tower, batch 8 = 1 x 8\n')
    x, y = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.float64, [None, 3])
    built = towers.build_towers(linear, (x, y), None, 2, remainder='weight')
    assert built.plan.batch_size is None
    assert str(built.plan).startswith(
        '2 towers, a batch of any size, a remainder is spread over the shards\n')


class ByGradient(tf.train.Optimizer):
    """With a method by the name under which TensorFlow's optimizers keep their rate."""

    def __init__(self):
        super().__init__(False, 'ByGradient')

    def _lr(self, gradient, variable):
        return .5 / tf.norm(gradient) + 0. * variable

    def _resource_apply_dense(self, grad, handle):
        rate = self._lr(grad, handle) if callable(self._lr) else self._lr
        return handle.assign_sub(rate * grad)


class OfLayers(ByGradient):
    """With a rate for each layer."""

    def __init__(self):
        super().__init__()
        self._lr = np.array([.5, .25, .125])


@pytest.mark.parametrize('optimizer, options, reduction, rate', first_fast(5, [
    (ByGradient, dict(reduction='mean'), "mean: the gradient of the batch's mean loss",
     'not known to the plan'),
    (sgd, dict(reduction='mean'), "mean: the gradient of the batch's mean loss", '0.5'),
    (momentum, dict(), "sum: 2 x the gradient of the batch's mean loss",
     '0.1; on the sum, steps as 2 x 0.1 = 0.2 would on the mean'),
    (lambda: tf.train.AdamOptimizer(0.25), dict(), "sum: 2 x the gradient of the batch's mean loss",
     '0.25; AdamOptimizer steps on a sum (nearly) as on the mean'),
    (lambda: sgd(tf.constant(1., name='rate')), dict(),
     "sum: 2 x the gradient of the batch's mean loss",
     "the tensor 'rate'; on the sum, steps as 2 x the rate would on the mean"),
    (OfLayers, dict(reduction='mean'), "mean: the gradient of the batch's mean loss",
     'not known to the plan'),
    (lambda: tf.train.FtrlOptimizer(0.25), dict(), "sum: 2 x the gradient of the batch's mean loss",
     '0.25; applied to a sum of 2'),
    (sgd, dict(devices=1), 'sum (of one tower: its own gradient)', '0.5'),
    (lambda: sgd(lambda: 0.75), dict(reduction='mean'),
     "mean: the gradient of the batch's mean loss", '0.75')]))
def test_reduction_and_learning_rate(optimizer, options, reduction, rate):
    plan = plan_of(linear, optimizer=optimizer, **options)
    assert (plan.line('reduction'), plan.line('learning rate')) == (reduction, rate)


def sum_of_squares(x, y):
    kernel = tf.get_variable('kernel', [6, 3], x.dtype)
    return tf.reduce_sum(tf.square(tf.matmul(x, kernel) - y))


def ring(**options):
    return towers.Cluster('ring', ['a:1', 'b:1'], **options)


_TAKE_THE_MEAN = (
    "not proven: the loss is a sum over the examples, of which the towers take the mean; pass "
    "reduction='sum', with equal shards and no micro-batches, or return the mean over the examples")
_ADD_UP = 'the loss is a sum over the examples, and the towers add up'


@pytest.mark.parametrize('options, text', first_fast(4, [
    (dict(), _ADD_UP), (dict(shares=[3, 1]), _TAKE_THE_MEAN),
    (dict(memory=towers.Memory(accumulate=2)), _TAKE_THE_MEAN),
    (dict(cluster=ring(uneven=True)), _TAKE_THE_MEAN),
    (dict(reduction='mean'), _TAKE_THE_MEAN), (dict(cluster=ring()), _ADD_UP)]))
def test_whether_shards_are_added_up_where_the_loss_is_a_sum(options, text):
    """The machines of a ring have batches of one size, if that is static, and not `uneven`."""
    line = plan_of(sum_of_squares, optimizer=sgd, **options).line('one device')
    assert text in line


@pytest.mark.parametrize('options, end', [
    (dict(reduction='mean'), ''),
    (dict(), ', and the update takes 2 times its gradient'),
    (dict(cluster=ring()), ', and the update takes 4 times its gradient; the batch is that of all '
     'machines'),
    (dict(reduction='mean', remainder='drop'), '; a remainder of the batch is left out')])
def test_what_a_proven_step_does_other_than_one_device(options, end):
    line = plan_of(linear, optimizer=sgd, **options).line('one device')
    unused_condition, text = line.split(': the loss is a mean over the examples')
    assert re.sub(r' \(\d+ operations\)', '', text) == end


def by_global_norm(pairs):
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], .1)
    return list(zip(gradients, [variable for _, variable in pairs]))


REPLICATED = dict(variables=towers.VariablePlacement('replicated'))
MICRO_BATCHES = dict(memory=towers.Memory(accumulate=2))


@pytest.mark.parametrize('fixed, transform, options, is_named', [
    (None, by_global_norm, {}, False), ([0, 1], by_global_norm, MICRO_BATCHES, True),
    ([0, 0], by_global_norm, {}, True), (None, by_global_norm, REPLICATED, True)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (None, by_global_norm, MICRO_BATCHES, False), ([0, 1], by_global_norm, {}, False),
            (None, by_global_norm, dict(cluster=ring()), True), ([0, 0], None, {}, False)]])
def test_rows_that_a_norm_counts_otherwise_than_on_one_device_are_named(
        fixed, transform, options, is_named):
    """The rows of the towers are put together. Those of examples are one device's; those of fixed
    indices each tower has, and they are added up if no index is there twice."""
    def model(ids):
        table = tf.get_variable('table', [8, 4])
        if fixed is None:
            return tf.reduce_mean(tf.gather(table, ids))
        return tf.reduce_mean(tf.cast(ids, tf.float32)) * tf.reduce_sum(tf.gather(table, fixed))
    with tf.Graph().as_default():
        built = towers.build_towers(
            model, (tf.placeholder(tf.int32, [None]),),
            towers.Objective(sgd(), transform_gradients=transform), 2, 'mean', **options)
    of_rows = 'but for how often an index occurs in a sparse gradient that a transformation of'
    assert (of_rows in built.plan.line('one device')) == is_named


@pytest.mark.parametrize('cluster', [None, ring()])
def test_a_sum_that_each_machine_adds_to_a_variable_of_its_own_is_named(cluster):
    with tf.Graph().as_default():
        line = towers.build_towers(counting, any_number_of_examples(), sgd(), 2,
                                   cluster=cluster).plan.line('one device')
    of_each_machine = "but for what the towers of each machine write from its own examples: 'seen' ("
    assert (of_each_machine in line) == (cluster is not None)


def test_evaluation_has_no_lines_of_training():
    assert [label for label, _ in plan_of().lines] == [
        'towers', 'variables', 'variables on', 'session', 'session_config']
    assert plan_of(devices=1).line('session') is None


@pytest.mark.parametrize('update_ops, text, owners', [
    ('all', '2 update ops of every tower ride on the train op', [0, 1]),
    pytest.param('none', "nobody's 2 update ops run", [], marks=pytest.mark.slow)])
def test_who_owns_batch_norm(update_ops, text, owners):
    plan = plan_of(normed, 8, sgd, update_ops=update_ops, dtype='float32')
    assert plan.line('batch norm') == text
    assert [tower.index for tower in plan.towers if 'batch-norm updates' in tower.owns] == owners


@pytest.mark.parametrize('device, devices, text', first_fast(2, [
    (None, ['/gpu:3'], '/gpu:3'), ('balanced', 2, 'balanced by size, /cpu:0, /cpu:1'),
    ('/gpu:1', 2, '/gpu:1')]))
def test_where_variables_are(device, devices, text):
    assert plan_of(optimizer=sgd, devices=devices, variables=towers.VariablePlacement(
        device)).line('variables on') == text
