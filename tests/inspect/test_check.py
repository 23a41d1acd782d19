"""`check_towers`: equal for good models, and the likely cause named for each kind of bad one."""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import linear, two_layers
from case_marks import first_fast

VECTORS = samples.vectors(8)
slow = pytest.mark.slow


def adam():
    return tf.train.AdamOptimizer(0.01)


# ---- good models --------------------------------------------------------------------------------

@slow
@pytest.mark.parametrize('name', ['slim', pytest.param('keras', marks=slow),
                                  pytest.param('while_loop', marks=slow)])
def test_good_models_are_equal(name):
    sample = samples.SAMPLES[name]
    report = towers.check_towers(sample.model_fn, sample.data(5), adam, 2, steps=2,
                                 remainder='weight', reduction='sum')
    assert report.equal and report.first is None and report.cause is None, str(report)
    assert report.worst.relative < 1e-9
    if name != 'keras':  # which has a factor in float32, on some versions
        assert report.tolerance == 1e-9
    assert (report.towers, report.steps, report.reduction) == (2, 2, 'sum')
    proof, text = str(report).split('\n')
    assert text.startswith('equal to within ') and 'proven' in proof


@pytest.mark.slow
def test_it_compares_all_that_a_step_makes_and_leaves_the_program_as_it_was(graph):
    tf.get_variable('mine', [2])
    before = graph.get_operations()
    report = towers.check_towers(two_layers, VECTORS, adam, steps=3)
    assert graph.get_operations() == before and tf.get_default_graph() is graph
    # 3 losses, 2 gradients, 2 variables, 2 x 2 slots and the two powers of beta
    assert report.equal and report.compared == 3 + 2 + 2 + 4 + 2
    with tf.init_scope():  # eagerly, where TF can
        in_float32 = towers.check_towers(linear, samples.vectors(8, 'float32'), steps=1)
    assert in_float32.equal and in_float32.tolerance == 1e-4 and in_float32.compared == 1 + 3
    assert in_float32.not_finite is None


@pytest.mark.slow
def test_a_half_precision_model_is_allowed_its_rounding():
    def model(of_batch):
        def model_fn(x, y):
            kernel = tf.get_variable('kernel', [6, 3], tf.float32)
            product = tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(kernel, tf.bfloat16))
            return of_batch(tf.square(tf.cast(product, tf.float32) - tf.cast(y, tf.float32)))
        return model_fn
    report = towers.check_towers(model(tf.reduce_mean), VECTORS)
    assert report.equal and report.tolerance == 0.1, str(report)
    report = towers.check_towers(model(tf.reduce_sum), VECTORS)
    assert not report.equal and 'the loss sums over the batch' in report.cause
    strict = towers.check_towers(model(tf.reduce_mean), VECTORS, tolerance=1e-12)
    assert not strict.equal and 1e-12 < strict.worst.relative < 0.1


def with_batch_norm(x, y):
    net = slim.batch_norm(slim.fully_connected(x, 3, activation_fn=None), scale=True)
    return samples.mean_squared_error(net, y)


def linear_layer(x):
    return tf.matmul(x, tf.get_variable('kernel', [6, 3], x.dtype))


@pytest.mark.slow
def test_batch_norm_agrees_on_equal_shards():
    """The biases before slim's have the gradient zero, or what rounding leaves of it."""
    report = towers.check_towers(with_batch_norm, samples.vectors(12, 'float32'), steps=2,
                                 same_shards=True, tolerance=1e-3)
    assert report.equal, str(report)
    assert str(report).splitlines()[2:] == [
        'not compared (its gradient is zero but for rounding): fully_connected/biases',
        'not compared (a moving variance, under same_shards): BatchNorm/moving_variance']


@pytest.mark.slow
def test_inputs_as_a_dict_with_sparse_ones():
    def model_fn(features):
        table = tf.get_variable('table', [5, 2], tf.float64)
        rows = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
        return tf.reduce_mean(tf.square(rows - features['y']))
    ids = tf.SparseTensorValue([[0, 0], [0, 1], [1, 0], [2, 2], [3, 0]],
                               np.array([1, 2, 0, 4, 2], 'int64'), [4, 3])
    inputs = {'ids': ids, 'y': np.arange(8.).reshape(4, 2)}
    assert towers.check_towers(model_fn, inputs, num_towers=2).equal
    with pytest.raises(towers.InputError, match='not sparse'):
        towers.check_towers(model_fn, inputs, same_shards=True)


def clip(pairs):
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.01)
    return list(zip(gradients, [variable for _, variable in pairs]))


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(make_optimizer=lambda: towers.Objective(tf.train.GradientDescentOptimizer(
        tf.constant(0.1, tf.float64)), lambda every: every[:1])),
    dict(regularization='add', model_fn=samples.slim_layers),
    pytest.param(dict(reduction='sum', devices=['/cpu:2', '/cpu:0', '/cpu:1', '/cpu:3']),
                 marks=slow),
    pytest.param(dict(update_ops='none', make_optimizer=lambda: towers.Objective(
        tf.train.MomentumOptimizer(0.01, 0.9), transform_gradients=clip)), marks=slow)],
    ids=lambda options: ' '.join(sorted(options)))
def test_options_hold_on_both_sides(options):
    options = dict(options)
    report = towers.check_towers(options.pop('model_fn', two_layers), VECTORS, steps=1, **options)
    assert report.equal, str(report)
    assert report.towers == (4 if 'devices' in options else options.get('num_towers', 2))


# ---- bad models, and why ------------------------------------------------------------------------

def with_dropout(x, y):
    return samples.mean_squared_error(tf.nn.dropout(linear_layer(x), rate=0.5, seed=5), y)


def that_sums(x, y):
    return tf.reduce_sum(tf.square(linear_layer(x) - y))


def divides_by_the_positives(x, y):
    weights = tf.cast(y > 0.5, tf.float64)
    return tf.reduce_sum(tf.square(linear_layer(x) - y) * weights) / tf.reduce_sum(weights)


def takes_a_norm_of_the_batch(x, y):
    x = x - tf.reduce_mean(x, 0)
    return samples.mean_squared_error(linear_layer(x), y)


@pytest.mark.parametrize('make, cause', first_fast(1, [
    (lambda: with_batch_norm, "batch norm: each tower.*batch_norm='sync'.*same_shards=True"),
    (lambda: with_dropout, r'random numbers in the model \(RandomUniform\), such as dropout'),
    (lambda: divides_by_the_positives, 'does not prove: .* divides by a sum over the examples'),
    (lambda: takes_a_norm_of_the_batch, 'does not prove: .* examples'),
    (lambda: that_sums, 'the loss sums over the batch.*mean over examples')]))
def test_the_likely_cause_is_named(make, cause):
    dtype = 'float32' if 'batch norm' in cause else 'float64'
    report = towers.check_towers(make(), samples.vectors(8, dtype), steps=1, num_towers=2,
                                 copies='reuse')
    assert not report.equal and report.first is not None
    assert report.worst.relative >= report.first.relative > report.tolerance
    assert '\nNOT equal: ' in str(report) and report.proof.startswith(
        ('not proven', 'proven, but', 'proven, if'))
    assert re.search(cause, report.cause), report.cause


def test_a_condition_of_the_plan_that_does_not_hold_is_the_likely_cause():
    """Two towers have four rows of index 0, and one device has two: their norms differ."""
    def looks_up_a_row_twice(x):
        table = tf.get_variable('table', [4, 6], tf.float64, tf.constant_initializer(.5))
        return tf.reduce_mean(tf.square(tf.reduce_sum(tf.gather(table, [0, 0]) * x[:, None], [1, 2])))

    def by_norm(pairs):
        gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], .1)
        return list(zip(gradients, [variable for _, variable in pairs]))
    report = towers.check_towers(looks_up_a_row_twice, VECTORS[:1], lambda: towers.Objective(
        tf.train.GradientDescentOptimizer(1.), transform_gradients=by_norm), steps=2)
    assert not report.equal
    assert re.match('a condition of the plan that does not hold here: if no constant.*, but for how '
                    "often an index occurs in a sparse gradient .*: 'table'.$", report.cause)


def test_what_is_not_finite_on_the_towers_alone():
    """A shard without a positive example divides by zero; the whole batch does not."""
    def model_fn(x, positive):
        return linear(x, x[:, :3]) * 1. / tf.reduce_sum(positive)
    batch = VECTORS[0], np.float64([1.] * 4 + [0.] * 4)
    report = towers.check_towers(model_fn, batch, steps=1)
    assert not report.equal and report.not_finite[:2] == ('loss', 'of step 1')
    assert 'only the towers' in report.cause


def test_a_step_counts_once_for_decay():
    """Three steps of 1, 0.5 and 0.25 of the rate: a step that stood still would give 3."""
    report = towers.check_towers(samples.slope, (np.ones(4),), lambda: (
        tf.train.GradientDescentOptimizer(tf.train.exponential_decay(
            1., tf.train.get_or_create_global_step(), 1, 0.5))))
    assert report.equal, str(report)
    assert report.compared == 3 + 1 + 2  # losses, a gradient, w and the step


# ---- misuse -------------------------------------------------------------------------------------

@pytest.mark.parametrize('options, text', [
    (dict(num_towers=1), 'expected at least 2 towers to compare with one device'),
    (dict(steps=0), 'steps=0: expected'), (dict(steps=1.), 'steps=1.0'), (dict(seed=-1), 'seed=-1'),
    (dict(tolerance='small'), "tolerance='small'"),
    (dict(make_optimizer=tf.train.MomentumOptimizer), 'a function that makes the optimizer'),
    (dict(make_optimizer=lambda: 5), 'expected a tf.train.Optimizer'),
    (dict(make_optimizer=lambda: towers.Objective(
        tf.train.GradientDescentOptimizer(.1), [tf.Variable(1.)])), 'expected a function'),
    (dict(memory=2), 'a towers.Memory, or None'),
    (dict(optimizer=None), 'takes no optimizer: expected some of make_optimizer, num_towers, .*'
     'same_shards, .*feed, devices, .* make_optimizer= is a function'),
    (dict(reuse=True), 'takes no reuse: expected some of make_optimizer, .*batch_norm.$'),
    (dict(remainder='drop', num_towers=3), "a batch that divides, or remainder='weight'"),
    (dict(same_shards=True, num_towers=9), 'too few'),
    (dict(num_towers=3), 'does not divide'),
    (dict(num_towers=3, model_fn=lambda x, y: None), 'does not divide'),  # before any step
    (dict(num_towers=100000), 'num_towers=100000: expected a whole number of at most 10000'),
    (dict(num_towers=10 ** 30), 'expected a whole number of at most 10000'),
    (dict(model_fn=lambda x, y: None), 'returned None'),
    (dict(inputs=(object(), 1)), 'expected arrays')])
def test_misuse(options, text):
    with pytest.raises(towers.TowersError, match=text):
        towers.check_towers(**dict(dict(model_fn=linear, inputs=VECTORS), **options))


def test_tensors_for_arrays_are_refused():
    with pytest.raises(towers.InputError, match='takes arrays'):
        towers.check_towers(linear, (tf.constant(VECTORS[0]), VECTORS[1]))


@pytest.mark.parametrize('is_on_towers', [False, True], ids=['one device', 'towers'])
def test_a_step_that_fails_says_where_and_why_in_one_line(is_on_towers):
    """A label that is out of range for all examples, or for a shard of two alone."""
    def model_fn(values, rows):
        least = 3 if is_on_towers else 9
        picked = tf.gather(tf.range(least), rows + least - tf.shape(values)[0] - 1)
        return tf.reduce_mean(values * tf.get_variable('w', [])) + tf.cast(
            tf.reduce_sum(picked), tf.float32)
    with pytest.raises(towers.StepError) as caught:
        towers.check_towers(model_fn, (np.ones(4, np.float32), np.array(
            [2, 3, 2, 3] if is_on_towers else [1, 2, 3, 9], np.int32)))
    assert re.fullmatch(
        'the model failed %s in .*[gG]ather.*: .*indices.* = .* is not in .*' % (
            'on the 2 towers, and not on one device,' if is_on_towers else 'on one device'),
        str(caught.value)), str(caught.value)
    assert isinstance(caught.value.__cause__, tf.errors.InvalidArgumentError)


def batch_normalized(x):
    x, _, _ = tf.nn.fused_batch_norm(
        tf.reshape(x, [-1, 1, 1, 3]), tf.get_variable('scale', [3]), tf.zeros([3]))
    return tf.reduce_mean(tf.square(tf.reduce_sum(x, [1, 2, 3]) - .5))


@slow
@pytest.mark.parametrize('options', [
    dict(num_towers=2, memory=towers.Memory(accumulate=3)),
    dict(devices='/cpu:0+/cpu:1', pipeline=towers.Pipeline(micro_batches=3, stages='auto'))],
    ids=['accumulate', 'pipeline'])
def test_each_micro_batch_is_a_part_of_the_batch(options):
    """What `same_shards` repeats, and losses are added up over."""
    values = np.random.RandomState(0).rand(18, 3).astype(np.float32)
    report = towers.check_towers(batch_normalized, values, same_shards=True, **options)
    assert report.equal, report
    assert not towers.check_towers(batch_normalized, values, **options).equal

    def of_sum(x):
        return tf.reduce_sum(tf.square(tf.matmul(x, tf.get_variable('w', [3, 1])) - 1))
    assert 'the loss sums over the batch' in str(
        towers.check_towers(of_sum, values, **options))


# ---- programs that it once judged wrongly --------------------------------------------------------

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(12, 4).astype('f'), RANDOM.randn(12, 3).astype('f')
INITIAL = tf.constant_initializer(np.random.RandomState(7).randn(4, 3).astype('f') * .5)


def error(out, y):
    return tf.reduce_mean(tf.reduce_sum(tf.square(out - y), 1))


def kernel():
    return tf.get_variable('w', [4, 3], initializer=INITIAL)


def counts_its_calls(x, y):
    count = tf.get_variable('count', [], tf.int64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 1)]):
        return error(tf.matmul(x, kernel()), y)


def averages_inline(x, y):
    return error(tf.matmul(slim.batch_norm(x, updates_collections=None, decay=.5), kernel()), y)


class IgnoresTheStep(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return super(IgnoresTheStep, self).apply_gradients(grads_and_vars, name=name)


def ignores_the_step():
    tf.train.get_or_create_global_step()
    return IgnoresTheStep(.1)


@pytest.mark.parametrize('model_fn, make_optimizer, options', first_fast(1, [
    (counts_its_calls, None, {}), (averages_inline, None, dict(same_shards=True)),
    (lambda x, y: error(tf.matmul(x, kernel()), y), ignores_the_step, {})]),
    ids=['count', 'inline', 'step'])
def test_what_is_equal(model_fn, make_optimizer, options):
    towers.mend_slim()
    report = towers.check_towers(model_fn, (X, Y), make_optimizer, **options)
    assert report.equal, str(report)


def scaled_by_its_first_batch(x, y):
    """Weight normalization with data-dependent initialization, as Salimans and Kingma have it."""
    direction = tf.get_variable('v', [4, 3], initializer=tf.random_normal_initializer())
    out = tf.matmul(x, tf.cond(tf.is_variable_initialized(direction), direction.read_value,
                               lambda: direction.initial_value))
    scale = tf.get_variable('g', initializer=1. / tf.sqrt(tf.reduce_mean(tf.square(out), 0)))
    return error(tf.matmul(x, direction) * scale, y)


@pytest.mark.slow
def test_an_initial_value_of_a_part_of_the_batch_is_not_equal():
    report = towers.check_towers(scaled_by_its_first_batch, (X, Y), steps=1)
    assert not report.equal and report.not_finite is None
    assert report.first[:2] == ('initial value', 'g')
    assert '\nNOT equal: initial value g differs by ' in str(report)
    assert "tower 0's part of it: compute it from the whole batch" in report.cause
    # Shards that are alike have the whole batch's.
    assert towers.check_towers(scaled_by_its_first_batch, (X, Y), steps=1, same_shards=True).equal


@pytest.mark.parametrize('options, names', [
    (dict(devices=1), []), (dict(devices=1, memory=towers.Memory(accumulate=2)), ['g'])])
def test_the_plan_names_such_an_initial_value(options, names):
    plan = towers.build_towers(scaled_by_its_first_batch, (X, Y), samples.sgd(), **options).plan
    assert plan.initial_of_first == names
    line = "  initial value    of g is of tower 0's part of the batch, not of all of it"
    assert str(plan).split('\n').count(line) == len(names)


@pytest.mark.slow
def test_gradients_that_the_model_takes_of_all_variables():
    def model_fn(x, y):
        loss = error(tf.matmul(x, kernel()), y)
        found = [each for each in tf.gradients(loss, tf.trainable_variables()) if each is not None]
        return loss + sum(.3 * tf.reduce_sum(each) for each in found)
    samples.check_against_one_device(model_fn, (X, Y), tolerance=1e-5, reduction='mean',
                                     variables=towers.VariablePlacement('replicated'))


def test_a_loss_that_depends_on_no_variable():
    def model_fn(x, y):
        tf.get_variable('w', [])
        return tf.reduce_mean(x) + tf.reduce_mean(y)
    with pytest.raises(towers.GradientError,
                       match='^the loss depends on none of the 1 trainable variables: there is no '
                             'training to compare'):
        towers.check_towers(model_fn, VECTORS)
