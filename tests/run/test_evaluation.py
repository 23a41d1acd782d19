"""Evaluation is exact for any number of examples; the hook evaluates when it says."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import (InputError, InvalidArgumentError, ModelFunctionError,
                           SharedVariableError)
from towers.run.evaluation import Evaluation
from towers.run.evaluation_hook import EvaluationHook
from case_marks import first_fast

X = np.array([3., 1., 4., 1., 5., 9., 2., 6., 5., 3., 5.])
Y = np.arange(11)


def model_fn(x, y):
    w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
    return towers.ModelOutput(
        tf.reduce_mean(w * x), metrics={'square': tf.reduce_mean(x ** 2),
                                        'even': tf.reduce_mean(tf.cast(tf.equal(y % 2, 0),
                                                                       tf.float64))},
        predictions={'y': y, 'wx': w * x})


def data(count, batch, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(
        batch, drop_remainder=drop_remainder)


def session_of(evaluation):
    session = tf.Session(config=towers.session_config(evaluation.built.devices))
    session.run(tf.global_variables_initializer())
    return session


@pytest.mark.slow
def test_every_example_counts_once():
    count, batch = 7, 2  # always fewer examples than towers
    evaluation = Evaluation(model_fn, data(count, batch), 3)
    with session_of(evaluation) as session:
        for _ in range(2):  # it starts from the beginning each time
            result = evaluation.run(session)
            assert sorted(result) == ['even', 'examples', 'loss', 'square']
            assert result['examples'] == count and isinstance(result['examples'], int)
            assert result['loss'] == pytest.approx(X[:count].mean(), rel=1e-12)
            assert result['square'] == pytest.approx((X[:count] ** 2).mean(), rel=1e-12)
            assert result['even'] == pytest.approx((count + 1) // 2 / float(count), rel=1e-12)
        parts = list(evaluation.predict(session))
        assert [len(part['y']) for part in parts] == [2, 2, 2, 1]
        assert np.concatenate([part['y'] for part in parts]).tolist() == Y[:count].tolist()
        assert np.concatenate([part['wx'] for part in parts]).tolist() == X[:count].tolist()


@pytest.mark.slow
def test_it_evaluates_the_variables_of_the_training():
    x, y = tf.data.make_one_shot_iterator(data(8, 4, True).repeat()).get_next()
    step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn, (x, y), tf.train.GradientDescentOptimizer(0.25), 2,
                                'mean', global_step=step)
    variables = len(tf.global_variables())
    evaluation = Evaluation(model_fn, data(7, 3), trained=built)
    assert evaluation.built.devices == built.devices
    assert Evaluation(model_fn, data(7, 3), '/cpu:0', built).built.devices == (
        '/device:CPU:0',)
    assert len(tf.global_variables()) == variables
    assert evaluation.built.train_op is None
    with session_of(evaluation) as session:
        session.run(built.train_op)
        # d/dw of the mean of w x over the first batch is its mean.
        w = 1 - 0.25 * X[:4].mean()
        assert evaluation.run(session)['loss'] == pytest.approx(w * X[:7].mean(), rel=1e-12)
        assert session.run(step) == 1
        # The training's own input goes on where it was.
        assert session.run(built.predictions)['y'].tolist() == [4, 5, 6, 7]


def test_sparse_inputs_and_strings_are_counted_by_towers():
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.SparseTensor([[0, 1], [2, 0], [4, 2]], [1., 2., 3.], [5, 3]),
         ['a', 'b', 'c', 'd', 'e'])).batch(2)

    def sparse_model(features, names):
        return towers.ModelOutput(None, metrics={
            'sum': tf.reduce_mean(tf.sparse.reduce_sum(features, 1))}, predictions=names)
    evaluation = Evaluation(sparse_model, dataset, 2)
    with session_of(evaluation) as session:
        assert evaluation.run(session) == {'sum': pytest.approx(6 / 5.), 'examples': 5}
        assert np.concatenate(list(evaluation.predict(session))).tolist() == [
            b'a', b'b', b'c', b'd', b'e']


@pytest.mark.slow
def test_a_pair_of_tf_metrics_counts_all_batches_from_0_each_time():
    def words(x, y):
        weights = tf.cast(y % 3, tf.float64)  # of an example
        return {'metrics': {'mean': tf.metrics.mean(x, weights), 'x': tf.reduce_mean(x)},
                'predictions': y}
    evaluation = Evaluation(words, data(7, 3), 2)
    weights = np.arange(7) % 3
    with session_of(evaluation) as session:
        for _ in range(2):
            assert evaluation.run(session) == {
                'mean': pytest.approx((weights * X[:7]).sum() / weights.sum(), rel=1e-6),
                'x': pytest.approx(X[:7].mean(), rel=1e-12), 'examples': 7}


@pytest.mark.parametrize('collections, is_shared', first_fast(1, [
    (['local_variables'], True), (['local_variables', 'metric_variables'], True),
    (['local_variables', 'metric_variables'], False)]))
def test_a_counter_of_the_models_own_begins_at_0_or_is_refused(collections, is_shared):
    """One that no collection tells of, or that the training counts in, would go on from there."""
    def counting(x, y):
        total = tf.get_local_variable(
            'total', [], tf.float64, tf.zeros_initializer(), collections=collections
            ) if is_shared else tf.Variable(tf.zeros([], tf.float64), trainable=False,
                                            collections=collections)
        return {'loss': tf.get_variable('w', [], tf.float64) * tf.reduce_mean(x),
                'metrics': {'total': (total.read_value(), total.assign_add(tf.reduce_sum(x)))}}
    trained = towers.build_towers(counting, (X[:4], Y[:4]), tf.train.GradientDescentOptimizer(1.),
                                  2)
    if is_shared:
        with pytest.raises(InvalidArgumentError, match="'total' counts in the variable 'total'"):
            Evaluation(counting, data(7, 3), trained=trained)
        return
    evaluation = Evaluation(counting, data(7, 3), trained=trained)
    with session_of(evaluation) as session:
        session.run(tf.local_variables_initializer())
        session.run(trained.metrics['total'][1])
        assert [evaluation.run(session)['total'] for _ in range(2)] == [X[:7].sum()] * 2


# ---- the hook ------------------------------------------------------------------------------------

class Accuracy:
    """Stands for an `Evaluation`: its accuracy is a tenth of the step."""
    metrics = {'accuracy': None, 'loss': None}

    def __init__(self, step):
        self.step = step
        self.steps = []

    def run(self, session):
        assert isinstance(session, tf.Session)
        self.steps.append(int(session.run(self.step)))
        return {'accuracy': self.steps[-1] / 10., 'examples': 7}


class Listener:
    def __init__(self):
        self.told = []

    def evaluated(self, step, results, seconds):
        assert 0 <= seconds < 60
        self.told.append((step, results['accuracy']))


def run(steps, start=0, **options):
    """Steps of a session that starts at a step: the hook, when it evaluated, and who was told."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        train_op = tf.assign_add(step, 1).op
        evaluation, listeners = Accuracy(step), [Listener(), Listener()]
        hook = EvaluationHook(evaluation, step, listeners=listeners, **options)
        scaffold = tf.train.Scaffold(init_op=step.assign(start).op)
        done = start
        with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(scaffold), [hook]) as session:
            while done < steps and not session.should_stop():
                session.run(train_op)
                done += 1
    assert listeners[0].told == listeners[1].told
    return hook, evaluation.steps, [told for told, _ in listeners[0].told], done


@pytest.mark.slow
def test_every_so_many_steps_and_once_at_the_end():
    assert run(5, start=5)[1:3] == ([5], [5])  # also where there was nothing left to do
    hook, evaluated, told, _ = run(10, start=4, every_steps=3)
    assert evaluated == told == [6, 9, 10]  # as the run that it goes on with
    assert hook.latest == {'accuracy': 1., 'examples': 7}


@pytest.mark.slow
def test_a_run_stops_at_a_metric_and_stays_where_it_is():
    _, evaluated, told, done = run(100, every_steps=2, stop_at=('accuracy', 0.6))
    assert done == 6 and evaluated == told == [2, 4, 6]
    hook, evaluated, told, done = run(100, start=6, every_steps=2, stop_at=('accuracy', 0.55))
    assert done == 6 and evaluated == [6]
    assert told == []  # they were told by the run that stopped
    assert hook.latest['accuracy'] == 0.6
    # A higher aim is another run.
    _, evaluated, _, done = run(100, start=6, every_steps=2, stop_at=('accuracy', 0.75))
    assert done == 8 and evaluated == [6, 8]
    # Between evaluations nothing can have stopped.
    assert run(8, start=7, every_steps=2, stop_at=('accuracy', 0.55))[1] == [8]


@pytest.mark.slow
def test_the_end_is_left_out_when_told():
    assert run(5, every_steps=3, skip_end=lambda: False)[1] == [3, 5]
    hook, evaluated, _, _ = run(5, every_steps=3, skip_end=lambda: True)
    assert evaluated == [3] and hook.latest['accuracy'] == 0.3


# ---- what cannot be evaluated -------------------------------------------------------------------

def returning(**output):
    return lambda x, y: towers.ModelOutput(None, **{
        name: make(x) for name, make in output.items()})


@pytest.mark.slow
def test_what_cannot_be_evaluated():
    with tf.Graph().as_default():
        other = towers.build_towers(model_fn, (X, Y), None, 1)
    for error, text, model, dataset, options in [
            (InvalidArgumentError, 'returned neither a loss nor metrics: there is nothing',
             returning(updates=lambda x: [x]), data(4, 2), {}),
            (InvalidArgumentError, r"metric 'mean' has the shape \(3,\): expected one number",
             returning(metrics=lambda x: {'mean': tf.metrics.mean_tensor(tf.zeros(3))}),
             data(4, 2), {}),
            (InvalidArgumentError, "metric 'name' is of type string: expected a number",
             returning(metrics=lambda x: {'name': (tf.constant('x'), tf.no_op())}), data(4, 2), {}),
            (InvalidArgumentError, "metric 'one' is a pair with the value 1.0, a constant: expected",
             returning(metrics=lambda x: {'one': (1., tf.no_op())}), data(4, 2), {}),
            (ModelFunctionError, "metric 'name' is .*string.*: expected a scalar number",
             returning(metrics=lambda x: {'name': tf.constant('x')}), data(4, 2), {}),
            (InputError, r'gives elements of the shapes .*, single examples: expected batches',
             model_fn, tf.data.Dataset.from_tensor_slices((X, Y)), {}),
            (InvalidArgumentError, '^trained=<BuiltTowers: 1 towers? on .* belongs to another gra',
             model_fn, data(4, 2), dict(trained=other))]:
        with pytest.raises(error, match=text):
            Evaluation(model, dataset, 2, **options)


@pytest.mark.parametrize('name', first_fast(1, ['loss', 'examples']))
def test_a_metric_with_the_name_of_another_result_is_refused(name):
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4)
    with pytest.raises(InvalidArgumentError, match='^metric %r has the name of another' % name):
        towers.Evaluation(
            lambda x: towers.ModelOutput(tf.reduce_mean(x), metrics={name: tf.reduce_max(x[:1])}),
            dataset, 2)


def test_an_evaluation_without_trained_after_a_build():
    towers.build_towers(model_fn, (X[:4], Y[:4]), tf.train.GradientDescentOptimizer(1.), 2)
    with pytest.raises(SharedVariableError, match="^variable 'w' exists already in this graph: .* "
                       r'\(In an Evaluation reuse= is trained=, what build_towers returned\.\)$'):
        Evaluation(model_fn, data(7, 3), 2)


@pytest.mark.slow
def test_data_that_cannot_be_gone_through_once():
    for dataset, text in ((data(7, 3).filter(lambda x, y: tf.size(x) < 0), 'has no batch: expect'),
                          (data(7, 3).repeat(), 'has no end: expected one that goes through')):
        evaluation = Evaluation(lambda x, y: tf.reduce_mean(x), dataset, 2)
        with session_of(evaluation) as session:
            for call in (evaluation.run, lambda session: evaluation.check_examples(session, True)):
                with pytest.raises(InputError, match='the data set to be evaluated ' + text):
                    call(session)


def test_a_run_is_given_up_between_batches_and_misuse_of_it_is_refused():
    evaluation = Evaluation(lambda x, y: tf.reduce_mean(x), data(11, 3), 2)
    asked = []
    with session_of(evaluation) as session:
        assert evaluation.run(session, lambda: asked.append(1) or len(asked) == 3) is None
        assert len(asked) == 3 and evaluation.run(session, lambda: False)['examples'] == 11
        with pytest.raises(InvalidArgumentError, match='the model function returned no predictio'):
            evaluation.predict(session)
    for options, text in [
            ({'stop_at': ('loss', 1)}, 'a number, and every_steps, at'),
            ({'stop_at': ('precision', 1), 'every_steps': 1}, 'of loss'),
            ({'every_steps': 0}, 'every_steps=0: expected a whole number')]:
        with pytest.raises(InvalidArgumentError, match=text):
            EvaluationHook(evaluation, tf.train.get_or_create_global_step(), **options)
