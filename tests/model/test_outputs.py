"""towers.outputs: what a model function may return, and how the towers' outputs become one."""

import collections

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import ModelOutput, session_config
from towers.errors import ModelFunctionError
from towers.model.outputs import call_model_fn, merge_metrics, to_model_output, weighted_sum

Pair = collections.namedtuple('Pair', 'features labels')


def run(fetches, feed=None):
    with tf.Session(config=session_config(1)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return session.run(fetches, feed)


# ---- the call -----------------------------------------------------------------------------------

def test_how_inputs_become_arguments():
    for inputs, seen in (
            ((1, 2), (1, 2)), ([1, 2], (1, 2)), ((1,), (1,)),     # a plain tuple or list is spread
            (5, (5,)), ({'x': 1}, ({'x': 1},)), (Pair(1, 2), (Pair(1, 2),)),
            (({'x': 1}, [2, 3]), ({'x': 1}, [2, 3])), (None, (None,))):
        assert call_model_fn(lambda *arguments: arguments, inputs) == seen

    def three(features, labels, weights):
        return features + {}
    for inputs, count in ((1, 2), 2), ({'x': 1, 'y': 2}, 1):
        with pytest.raises(ModelFunctionError, match=(
                r'^the model function three\(features, labels, weights\) cannot take the inputs: .*'
                r'one argument each \(%d here\), everything else is one argument.$' % count)):
            call_model_fn(three, inputs)
    with pytest.raises(TypeError) as caught:
        call_model_fn(three, (1, 2, 3))
    assert not isinstance(caught.value, ModelFunctionError)  # of the model itself


# ---- what it returns ----------------------------------------------------------------------------

def test_a_dict_or_any_object_with_some_of_the_fields():
    loss, labels = tf.constant(1.), tf.constant([2])
    spec = collections.namedtuple('Spec', 'mode predictions loss')
    for returned in ({'loss': loss, 'predictions': labels},
                     ModelOutput(loss=loss, predictions=labels), spec('train', labels, loss)):
        output = to_model_output(returned, True)
        assert output.loss is loss and output.predictions is labels
        assert output.metrics is None and output.updates == ()
    output = to_model_output({'loss': loss, 'metrics': {'m': loss}, 'updates': [loss.op]}, True)
    assert output.metrics == {'m': loss} and output.updates == [loss.op]


# ---- metrics ------------------------------------------------------------------------------------

def test_scalar_metrics_are_means_over_the_examples():
    metrics = [{'accuracy': tf.constant(1.), 'right': tf.constant(3)},
               {'accuracy': tf.constant(0.5), 'right': tf.constant(1)}]
    values = run(merge_metrics(metrics, [0.75, 0.25]))
    assert values == {'accuracy': 0.875, 'right': 2.5}


def pairs_of_shard(x):
    """Metrics of a shard [n] as `(value, update_op)`."""
    labels = x > 2
    total, add = tf.metrics.mean(x)
    precision, recall = tf.metrics.precision(labels, x > 1), tf.metrics.recall(labels, x > 1)
    return {
        'mean': (total, add), 'auc': tf.metrics.auc(labels, x / 4, num_thresholds=3),
        'f1': (2 * precision[0] * recall[0] / (precision[0] + recall[0]),
               tf.group(precision[1], recall[1])),
        'update': (add, add), 'constant': (tf.constant(3.), tf.no_op()), 'number': (3., tf.no_op()),
        'loss': (tf.reduce_mean(x), tf.no_op()),
        'both': (total + tf.reduce_max(x), add)}


COUNTERS = {'auc', 'f1', 'update', 'mean', 'constant', 'number'}


def build(names, num_towers, batch=(0., 2., 3., 4.)):
    def model_fn(x):
        pairs = pairs_of_shard(x)
        return {'metrics': {name: pairs[name] for name in names}}
    return towers.build_towers(model_fn, tf.constant(batch), None, num_towers)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['loss', 'both'])
def test_pairs_whose_value_is_of_one_shard(name):
    with pytest.raises(ModelFunctionError, match=(
            "^metric '%s' is a pair with the value '.*which is computed from one shard.*"
            r'Pass tf.metrics.mean\(values\), of one value for each example' % name)):
        build({name}, 2)
    if name == 'both':
        with tf.Graph().as_default():
            assert set(build({name}, 1).metrics) == {name}  # which is the batch


@pytest.mark.slow
def test_a_pair_computed_from_counters_is_that_of_the_batch():
    built = build(COUNTERS, 2)
    assert set(built.metrics) == COUNTERS
    with tf.Session(config=session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.metrics['f1'][1])
        # 3 are called so, 2 of them are: a precision of 2/3 and a recall of 1.
        assert session.run(built.metrics['f1'][0]) == pytest.approx(0.8)


# ---- weighted_sum ------------------------------------------------------------------------------

def test_weighted_sum():
    values = [tf.constant(1.), tf.constant(3.), tf.constant(10.)]
    assert run(weighted_sum(values, [0.5, 0.25, 0.25])) == 3.75
    assert run(weighted_sum(values[:1], [1.])) == 1.
    mean = weighted_sum([tf.constant(1., tf.float64), tf.constant(2., tf.float64)], [0.5, 0.5])
    assert mean.dtype == tf.float64
    assert run(weighted_sum([tf.constant(1), tf.constant(2)], [0.5, 0.5])) == 1.5
    count = 2 ** 24 + 1  # float32 does not hold it
    assert run(weighted_sum([tf.constant(count)] * 2, [0.5, 0.5])) == count

    nothing = [tf.constant(2.), tf.constant(float('nan'))]  # has no weight, counts nothing
    for weights in [1., 0.], [tf.constant(each, tf.float64) for each in (1., 0.)]:
        assert run(weighted_sum(nothing, weights)) == 2.


@pytest.mark.parametrize('returned, text', [
    (lambda: None, '^the model function returned None .is a return statement missing.*: expected'),
    (lambda: {'predictions': tf.constant([1])}, 'returned no loss, and there is an optimizer'),
    (lambda: {'loss': tf.constant(1.), 'prediction': 1},
     "a dict with the keys 'loss', 'prediction': expected"),
    (lambda: (1, 2), 'returned a tuple: expected a scalar loss, or a dict or ModelOutput'),
    (lambda: tf.zeros([4]), r'the loss <tf.Tensor .* shape=\(4,\) .*: expected a scalar float of '
                            'this graph, the mean over the examples of the shard.'),
    (lambda: {'loss': tf.constant(1)}, 'the loss <tf.Tensor .*int32>: expected a scalar float'),
    (lambda: {'loss': 0.5}, 'the loss 0.5: expected a scalar float')])
@pytest.mark.parametrize('registers', [False, True])
def test_what_is_no_loss_is_refused(returned, text, registers):
    """Where losses are registered, as slim's are, the text says how to return them."""
    value = returned()
    if registers:
        tf.losses.mean_squared_error(tf.ones([4]), tf.ones([4]))
    with pytest.raises(ModelFunctionError, match=text) as caught:
        to_model_output(value, True)
    assert ('There are losses in the collection LOSSES' in str(caught.value)) == registers


def test_metrics_that_cannot_be_merged():
    for metrics, text in (
            ([[tf.constant(1.)]] * 2, 'have to be a dict with the same names in every'),
            ([{'a': tf.constant(1.)}, None], 'have to be a dict with the same names in every'),
            ([{'a': tf.constant([1., 2.])}] * 2, r"^metric 'a' is .*: expected a scalar number"),
            ([{'a': tf.constant('x')}] * 2, r"^metric 'a' is .*: expected a scalar number"),
            ([{'a': tf.constant(1j)}] * 2, r"^metric 'a' is .*: expected a scalar number")):
        with pytest.raises(ModelFunctionError, match=text):
            merge_metrics(metrics, [0.5, 0.5])
    with pytest.raises(ModelFunctionError, match="^metric 'label' is .*string.*: expected a scalar"):
        towers.build_towers(lambda x: {'metrics': {'label': x[0]}}, tf.constant(['a', 'b']), None, 2)
