"""What the plan says of losses whose answer is known by hand."""

import losses
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.proof.analysis import analyse
from towers.proof.batch_norms import find_batch_norms
from towers.proof.question import Question
from towers.proof.verdict import verdict_of

MEAN_OF_TOWERS = Question(adds_shards=False, static_size=None, part_name='tower')


@pytest.fixture(autouse=True)
def control_flow_v1():
    """Loops and branches as operations of the graph, as TF1 programs have them."""
    was_v2 = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    yield
    if was_v2:
        tf.enable_control_flow_v2()


def verdicts(table, names):
    """`{name: verdict}` of losses, all in one graph and in one analysis."""
    inputs = losses.make_inputs(losses.INPUTS)
    made = {}
    for name in names:
        with tf.variable_scope(name):
            made[name] = table[name](**{key: inputs[key] for key in losses.names_of(table[name])})
    operations = tf.get_default_graph().get_operations()
    analysis = analyse(operations, list(inputs.values()), list(made.values()))
    norms = find_batch_norms(analysis, operations)
    return {name: verdict_of([loss], analysis, norms, MEAN_OF_TOWERS).text
            for name, loss in made.items()}


def check_that_all_begin(table, names, beginning):
    found = verdicts(table, names)
    assert {name: text for name, text in found.items() if not text.startswith(beginning)} == {}


# Each notices a breakage of tests/breakages.py that no other fast loss notices.
NOTICED_BY_ONE = [
    'features_cut_at_batch_size', 'cumprod_of_mean', 'softmax_after_squeeze',
    'rows_of_blocks_by_a_carried_value', 'cond_in_a_while', 'contrast_of_three_dimensions',
    'first_column_counted_from_the_last', 'read_in_the_next_iteration',
    'constants_written_by_a_branch', 'power_that_a_list_carries', 'integer_mean',
    'top_k_by_count', 'concat_of_array', 'one_row_of_labels']


def test_what_couples_examples_is_not_proven():
    some = list(losses.COUPLED)[::36] + NOTICED_BY_ONE
    check_that_all_begin(losses.COUPLED, dict.fromkeys(some), 'not proven: ')


@pytest.mark.slow
def test_all_that_couples_examples_is_not_proven():
    check_that_all_begin(losses.COUPLED, list(losses.COUPLED), 'not proven: ')


def test_what_does_not_couple_examples_is_proven():
    check_that_all_begin(losses.INDEPENDENT, list(losses.INDEPENDENT)[::24], 'proven: ')


@pytest.mark.slow
def test_all_that_does_not_couple_examples_is_proven():
    check_that_all_begin(losses.INDEPENDENT, list(losses.INDEPENDENT), 'proven: ')


def plan_of(loss, inputs, **options):
    """The line of the plan about the equality with one device, through the public call."""
    built = towers.build_towers(loss, inputs, tf.train.GradientDescentOptimizer(.1), devices=2,
                                **options)
    return built.plan.line('one device')


def test_the_plan_says_what_is_proven():
    inputs = losses.make_inputs(['x', 'y'])
    line = plan_of(losses.INDEPENDENT['softmax_cross_entropy'], tuple(inputs.values()),
                   reduction='mean')
    assert line.startswith('proven: the loss is a mean over the examples (')


@pytest.mark.parametrize('loss, reduction, advice', [
    (lambda rows: tf.reduce_sum(rows), 'mean', "; pass reduction='sum', with equal shards"),
    (lambda rows: tf.reduce_sum(rows) + 3., 'sum', 'divide that term by the number of towers'),
    (lambda rows: tf.reduce_mean(tf.py_func(np.sort, [rows], rows.dtype)), 'mean',
     '; towers.check_towers measures'),
    (lambda rows: tf.reduce_mean(tf.reshape(rows, [2, -1]) + tf.zeros([2, 18])), 'mean',
     'constants in it fit some sizes alone; take sizes from tf.shape'),
    (tf.reduce_max, 'mean', '; towers.batch_sum, batch_mean and batch_concat give values of all')])
def test_the_plan_says_what_helps(loss, reduction, advice):
    inputs = losses.make_inputs(['x'])
    factor = tf.get_variable('factor', [], inputs['x'].dtype)
    line = plan_of(loss(tf.square(inputs['x'])) * factor, tuple(inputs.values()),
                   reduction=reduction)
    assert line.startswith('not proven: ') and advice in line


@pytest.mark.parametrize('batch_norm, beginning', [
    ('sync', 'proven: '), pytest.param('shard', 'proven, but for 1 batch norm of each tower',
                                       marks=pytest.mark.slow)])
def test_a_batch_norm_before_sums_of_the_whole_batch(batch_norm, beginning):
    def model_fn(x, weight):
        rows = tf.matmul(x, tf.get_variable('kernel', [6, 4]))
        mean, variance = tf.nn.moments(rows, [0])
        rows = tf.reduce_sum(rows * (rows - mean) / tf.sqrt(variance + .1), 1)
        return (towers.batch_sum(tf.reduce_sum(rows * weight)) /
                towers.batch_sum(tf.reduce_sum(weight)))
    inputs = losses.make_inputs(['x', 'weight'])
    line = plan_of(model_fn, tuple(inputs.values()), reduction='mean', batch_norm=batch_norm)
    assert line.startswith(beginning)


@pytest.mark.parametrize('loss, end', [
    (losses.COUPLED['max_over_batch'], "Max' (Max) is taken over the examples"),
    (lambda x: losses.average(losses.score(x)) + tf.reduce_sum(tf.range(64.)[:tf.shape(x)[0]]),
     '(StridedSlice) moves entries to places that are computed from the examples')])
def test_the_plan_says_at_which_operation_the_proof_ends(loss, end):
    inputs = losses.make_inputs(['x'])
    line = plan_of(loss, tuple(inputs.values()), reduction='mean')
    assert line.startswith('not proven: ') and end in line
