"""TensorBoard event files: values worked out by hand, tags without towers, once per step."""

import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run import step_clock
from towers.errors import InvalidArgumentError
from towers.run.step_clock import StepCounts
from towers.run.summaries import SummaryHook, default_summaries


class FakeTime:
    """Stands for the module `time`; tests move `now`."""
    now = 1000.

    def perf_counter(self):
        return self.now


@pytest.fixture(autouse=True)
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(step_clock, 'time', fake)
    return fake


def events(folder):
    """[(file name, event)] of a folder, but for the version that begins each file."""
    return [(path.name, event) for path in sorted(folder.iterdir()) if 'tfevents' in path.name
            for event in tf.train.summary_iterator(str(path))
            if event.HasField('summary') or event.HasField('session_log')]


def scalars(folder):
    """{step: {tag: value}}; a tag that a step has twice is an error."""
    found = {}
    for _, event in events(folder):
        for value in event.summary.value:
            of_step = found.setdefault(event.step, {})
            assert value.tag not in of_step
            of_step[value.tag] = value.simple_value
    return found


class Job:
    """A training of a and b, from 6 and 8, on the loss mean(x) * (3 a + 4 b) with mean(x) = 2.5.

    The gradient is (7.5, 10), of norm 12.5. A step of rate 0.1 takes 0.75 from a and 1 from b, so
    that after s steps (a, b) = (2 - s / 4) * (3, 4), of norm 10 - 1.25 s, and the loss of step s is
    62.5 * (2 - (s - 1) / 4).
    """

    def __init__(self, add_summaries=lambda x, product: None, reduction='mean', **options):
        def model_fn(x):
            a = tf.get_variable('a', [], initializer=tf.constant_initializer(6.))
            b = tf.get_variable('b', [], initializer=tf.constant_initializer(8.))
            product = x * (3. * a + 4. * b)
            add_summaries(x, product)
            return tf.reduce_mean(product)
        self.global_step = tf.train.get_or_create_global_step()
        self.rate = tf.constant(0.1)
        self.built = towers.build_towers(
            model_fn, (tf.constant([1., 2., 3., 4.]),),
            tf.train.GradientDescentOptimizer(self.rate), 2, reduction,
            global_step=self.global_step)
        self.summaries = default_summaries(self.built, self.rate, **options)

    def run(self, folder, number, summary_steps=2, last_step=None, checkpoints=None,
            each=lambda hook, step: None):
        """Trains; with `checkpoints`, saves every 4 steps there, and goes on from there."""
        hook = SummaryHook(self.summaries, StepCounts(self.global_step, 4, last_step=last_step),
                           str(folder), summary_steps, graph=tf.get_default_graph())
        hooks = [hook]
        if checkpoints:
            hooks.append(tf.train.CheckpointSaverHook(str(checkpoints), save_steps=4,
                                                      listeners=[hook.listener]))
        creator = tf.train.ChiefSessionCreator(
            config=towers.session_config(self.built.devices),
            checkpoint_dir=str(checkpoints) if checkpoints else None)
        with tf.train.MonitoredSession(creator, hooks) as session:
            for step in range(1, number + 1):
                session.run(self.built.train_op)
                each(hook, step)
        return hook


def test_values_of_each_step(tmp_path, time):
    def advance(hook, step):
        time.now += 0.25  # 4 examples: 16 a second
    Job(scalars={'half': tf.constant(0.5, tf.float16)}).run(
        tmp_path, 5, last_step=5, each=advance)
    found = scalars(tmp_path)
    assert sorted(found) == [2, 4, 5]
    for step, values in found.items():
        left, before = 2 - step / 4., 2 - (step - 1) / 4.
        expected = {'loss': 62.5 * before, 'learning_rate': 0.1, 'half': 0.5,
                    # Shards of mean 1.5 and 3.5: |G_k|^2 = 7.5^2 and 17.5^2, small = 181.25.
                    'noise_scale': 4 * (181.25 - 156.25) / (2 * 156.25 - 181.25),
                    'gradient_norm': 12.5, 'weight_norm': 5 * left}
        if step > 2:  # there is no speed before the third step
            expected['images_per_second'] = 16.
        assert values == pytest.approx(expected, rel=1e-6)


def test_norm_of_a_sparse_gradient_adds_repeated_rows_first(tmp_path):
    """Rows 1, 1, 1 and 2 of four examples: gradient rows (3/4, 3/4) and (1/4, 1/4)."""
    def model_fn(ids):
        table = tf.get_variable('table', [5, 2], initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids), 1))
    built = towers.build_towers(model_fn, (tf.constant([1, 1, 1, 2]),),
                                tf.train.GradientDescentOptimizer(0.5), 2, 'mean')
    assert isinstance(built.gradients[0][0], tf.IndexedSlices)
    summaries = default_summaries(built)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(summaries.scalars['gradient_norm']) == pytest.approx(math.sqrt(1.25))
        assert session.run(summaries.weights['weight_norm']) == pytest.approx(math.sqrt(10.))


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_the_noise_scale_is_that_of_plain_gradients(reduction):
    """Of the papers' formulas, with gradients of the shards by numpy; an L2 loss is in all."""
    x, y = np.random.RandomState(0).randn(12, 3), np.random.RandomState(1).randn(12)

    def model_fn(x, y):
        w = tf.get_variable('w', [3], tf.float64, tf.constant_initializer([.5, -1., 2.]),
                            regularizer=lambda w: tf.reduce_sum(w * w))
        return tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) - y))
    built = towers.build_towers(
        model_fn, (tf.constant(x), tf.constant(y)), tf.train.GradientDescentOptimizer(0.5), 3,
        reduction, regularization='add')
    errors = x.dot([.5, -1., 2.]) - y
    shards = [2 * (x[rows].T.dot(errors[rows])) / 4 + 2 * np.array([.5, -1., 2.])
              for rows in np.split(np.arange(12), 3)]
    small, big = np.mean([g.dot(g) for g in shards]), np.square(np.mean(shards, 0)).sum()
    trace, square = (small - big) / (1 / 4 - 1 / 12), (12 * big - 4 * small) / (12 - 4)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(default_summaries(built).scalars['noise_scale']) == pytest.approx(
            trace / square, rel=1e-10)


def test_half_precision_norms_do_not_overflow():
    def model_fn(x):
        w = tf.get_variable('w', [4], tf.float16, tf.constant_initializer(300.))
        return tf.reduce_mean(tf.reduce_sum(x * w, 1))  # of 4 * 300 ** 2 in the sum of squares
    built = towers.build_towers(model_fn, (tf.ones([2, 4], tf.float16),),
                                tf.train.GradientDescentOptimizer(0.5), 1)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(default_summaries(built).weights['weight_norm']) == 600.


def add_four(x, product):
    tf.summary.scalar('loss', tf.reduce_mean(x))
    with tf.variable_scope('layer'):
        tf.summary.histogram('products', product)
        tf.summary.scalar('largest', tf.reduce_max(x), family='kin')
    tf.summary.image('picture', tf.reshape(tf.cast(x, tf.uint8), [-1, 1, 1, 1]), max_outputs=1)


OF_FOUR = {'loss', 'layer/products', 'kin/layer/kin/largest', 'picture/image'}


def test_the_models_own_summaries_appear_once_under_the_names_of_one_device(tmp_path):
    with tf.Graph().as_default():
        add_four(tf.constant([1., 2.]), tf.constant([1., 2.]))
        with tf.Session() as session:
            on_one_device = tf.Summary.FromString(session.run(tf.summary.merge_all()))
    assert {value.tag for value in on_one_device.value} == OF_FOUR
    Job(add_four, norms=False).run(tmp_path, 2)
    summary, = [event.summary for _, event in events(tmp_path) if event.step == 2]
    by_tag = {value.tag: value for value in summary.value}
    assert len(by_tag) == len(summary.value)
    assert set(by_tag) == OF_FOUR | {'towers/loss', 'learning_rate'}
    assert by_tag['loss'].simple_value == 1.5  # of the first tower, which has 1 and 2
    assert by_tag['towers/loss'].simple_value == 109.375
    assert by_tag['kin/layer/kin/largest'].simple_value == 2.
    assert by_tag['layer/products'].histo.num == 2
    assert by_tag['picture/image'].image.width == 1


@pytest.mark.slow
def test_summaries_from_outside_are_written_when_they_are_given(tmp_path):
    """Those of an evaluation of the same model, for one, need the input of the evaluation."""
    job = Job(add_four, norms=False)

    def evaluated(x):
        tf.summary.scalar('of_evaluation', tf.reduce_mean(x))
        return tf.reduce_mean(x) * tf.get_variable('a', [])
    towers.build_towers(evaluated, (tf.placeholder(tf.float32, [4]),), None, 2, reuse=job.built)
    outside = tf.summary.scalar('outside', 3.)
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 6
    job.summaries = default_summaries(job.built, custom=[outside], norms=False)
    job.run(tmp_path, 2)
    assert set(scalars(tmp_path)[2]) == OF_FOUR | {'towers/loss', 'outside'}


def test_summaries_come_with_the_step_and_only_with_those_that_are_written(tmp_path):
    """Seven steps with a summary of every third: seven runs of the model, two of its summary."""
    ran = {'model': 0, 'summary': 0}

    def noted(value, where):
        def note(array):
            ran[where] += 1
            return array
        return tf.reshape(tf.py_func(note, [value], tf.float32), value.shape)

    def model_fn(x):
        x = noted(x, 'model')
        tf.summary.scalar('own', noted(tf.reduce_mean(x), 'summary'))
        return tf.reduce_mean(x) * tf.get_variable('a', [])
    global_step = tf.train.get_or_create_global_step()
    built = towers.build_towers(model_fn, (tf.ones([4]),), tf.train.GradientDescentOptimizer(0.1),
                                1, global_step=global_step)
    asked = []

    class Spied(SummaryHook):
        def before_run(self, run_context):
            arguments = SummaryHook.before_run(self, run_context)
            asked.append(arguments is not None)
            return arguments
    hook = Spied(default_summaries(built), StepCounts(global_step, 4), str(tmp_path), 3)
    with tf.train.MonitoredSession(tf.train.ChiefSessionCreator(), [hook]) as session:
        for _ in range(7):
            session.run(built.train_op)
    assert asked == [False, False, True, False, False, True, False]
    assert ran == {'model': 7, 'summary': 2}
    assert {step: values['own'] for step, values in scalars(tmp_path).items()} == {3: 1., 6: 1.}


@pytest.mark.slow
def test_a_resumed_run_writes_each_step_once_for_tensorboard(tmp_path):
    """Checkpoints at 4 and 8; killed after 7; goes on from 4."""
    def killed(hook, step):
        if step == 7:
            raise KeyError('killed')
    logs, checkpoints = tmp_path / 'logs', tmp_path / 'checkpoints'
    with pytest.raises(KeyError):
        Job().run(logs, 9, checkpoints=checkpoints, each=killed)
    assert set(scalars(logs)) >= {2, 4}  # brought to the disk by the checkpoint
    before = {name for name, _ in events(logs)}
    with tf.Graph().as_default():
        Job().run(logs, 6, last_step=10, checkpoints=checkpoints)
    new = [event for name, event in events(logs) if name not in before]
    assert (new[0].session_log.status, new[0].step) == (tf.SessionLog.START, 5)
    assert [event.step for event in new[1:]] == [6, 8, 10]
    losses = {event.step: event.summary.value[0].simple_value for event in new[1:]}
    assert losses == pytest.approx({6: 62.5 * 0.75, 8: 62.5 * 0.25, 10: 62.5 * -0.25})
    assert [event for path in logs.iterdir() for event in tf.train.summary_iterator(str(path))
            if event.graph_def]
    tensorboard = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    reader = tensorboard.EventAccumulator(str(logs))
    reader.Reload()
    assert [event.step for event in reader.Scalars('loss')] == [2, 4, 6, 8, 10]


def test_evaluations(tmp_path):
    def evaluate(hook, step):
        if step == 3:
            hook.evaluated(3, {'accuracy': np.float64(0.875), 'loss': 0.25, 'examples': 7}, 1.)
    hook = Job(norms=False).run(tmp_path, 4, summary_steps=4, each=evaluate)
    hook.evaluated(4, {'accuracy': 0.9375}, name='validation')  # by a hook that ends later
    found = scalars(tmp_path)
    assert found[3] == {'test/accuracy': 0.875, 'test/loss': 0.25}
    assert found[4]['validation/accuracy'] == 0.9375 and 'loss' in found[4]


def test_what_summaries_cannot_be_made_of(tmp_path):
    job = Job()
    without_optimizer = towers.build_towers(tf.reduce_mean, tf.ones([2]), None, 2)
    path = tmp_path / 'a file'
    path.write_text('')
    for make, text in [
            (lambda: default_summaries(without_optimizer), 'built without an optimizer'),
            (lambda: default_summaries(job.built, custom=[3]), 'expected a list of what tf.summ'),
            (lambda: SummaryHook(job.summaries, StepCounts(job.global_step, 4), str(tmp_path), 0),
             'summary_steps=0: expected a whole number'),
            (lambda: SummaryHook(job.summaries, StepCounts(job.global_step, 4), str(path)),
             'is a file: expected the name of a directory')]:
        with pytest.raises(InvalidArgumentError, match=text):
            make()
