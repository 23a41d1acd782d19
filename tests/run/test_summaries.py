"""TensorBoard event files: values worked out by hand, tags without towers, once per step."""

import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import InvalidArgumentError
from towers.run.summaries import SummaryHook, default_summaries
from case_marks import first_fast


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

    def run(self, folder, number, summary_steps=2, checkpoints=None, each=lambda hook, step: None):
        """Trains; with `checkpoints`, saves every 4 steps there, and goes on from there."""
        hook = SummaryHook(self.summaries, self.global_step, str(folder), summary_steps,
                           graph=tf.get_default_graph())
        hooks = [hook]
        if checkpoints:
            hooks.append(tf.train.CheckpointSaverHook(str(checkpoints), save_steps=4))
        creator = tf.train.ChiefSessionCreator(
            config=towers.session_config(self.built.devices),
            checkpoint_dir=str(checkpoints) if checkpoints else None)
        with tf.train.MonitoredSession(creator, hooks) as session:
            for step in range(1, number + 1):
                session.run(self.built.train_op)
                each(hook, step)


def values_of(summary):
    """{tag: value} of the scalars in a serialized `tf.Summary`."""
    return {value.tag: value.simple_value for value in tf.Summary.FromString(summary).value}


def test_values_of_each_step_and_of_evaluations(tmp_path):
    def evaluate(hook, step):
        if step == 3:
            hook.evaluated(3, {'accuracy': np.float64(0.875), 'loss': 0.25, 'examples': 7}, 1.)
    Job().run(tmp_path, 5, each=evaluate)
    found = scalars(tmp_path)
    assert sorted(found) == [2, 3, 4]
    assert found.pop(3) == {'test/accuracy': 0.875, 'test/loss': 0.25}
    for step, values in found.items():
        # Each weight is read during the step: before its update, or after it.
        assert 10 - 1.25 * step <= values.pop('train/weight_norm') <= 11.25 - 1.25 * step
        assert values == pytest.approx({
            'train/loss': 62.5 * (2 - (step - 1) / 4.), 'train/learning_rate': 0.1,
            'train/gradient_norm': 12.5,
            # Shards of mean 1.5 and 3.5: |G_k|^2 = 7.5^2 and 17.5^2, small = 181.25.
            'train/noise_scale': 4 * (181.25 - 156.25) / (2 * 156.25 - 181.25)}, rel=1e-6)


def test_norms_of_a_sparse_gradient_and_of_half_precision():
    """Rows 1, 1, 1 and 2 of four examples: gradient rows (3/4, 3/4) and (1/4, 1/4). In float16 the
    sum of the weights' squares, 10 * 300 ** 2, would overflow."""
    def model_fn(ids):
        table = tf.get_variable('table', [5, 2], tf.float16, tf.constant_initializer(300.))
        return tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids), 1))
    built = towers.build_towers(model_fn, (tf.constant([1, 1, 1, 2]),),
                                tf.train.GradientDescentOptimizer(0.5), 2, 'mean')
    assert isinstance(built.gradients[0][0], tf.IndexedSlices)
    summary = default_summaries(built)[0]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        values = values_of(session.run(summary))
    assert values['train/gradient_norm'] == pytest.approx(math.sqrt(1.25))
    assert values['train/weight_norm'] == pytest.approx(300 * math.sqrt(10.))


@pytest.mark.parametrize('reduction', first_fast(1, ['mean', 'sum']))
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
        assert values_of(session.run(default_summaries(built)[0]))[
            'train/noise_scale'] == pytest.approx(trace / square, rel=1e-6)


def add_four(x, product):
    tf.summary.scalar('loss', tf.reduce_mean(x))
    with tf.variable_scope('layer'):
        tf.summary.histogram('products', product)
        tf.summary.scalar('largest', tf.reduce_max(x), family='kin')
    tf.summary.image('picture', tf.reshape(tf.cast(x, tf.uint8), [-1, 1, 1, 1]), max_outputs=1)


OF_FOUR = {'loss', 'layer/products', 'kin/layer/kin/largest', 'picture/image'}


@pytest.mark.slow
def test_the_models_own_summaries_appear_once_under_the_names_of_one_device(tmp_path):
    with tf.Graph().as_default():
        add_four(tf.constant([1., 2.]), tf.constant([1., 2.]))
        with tf.Session() as session:
            on_one_device = tf.Summary.FromString(session.run(tf.summary.merge_all()))
    assert {value.tag for value in on_one_device.value} == OF_FOUR
    job = Job(add_four, norms=False)

    def evaluated(x):  # whose summaries need the input of the evaluation, and are not written
        tf.summary.scalar('of_evaluation', tf.reduce_mean(x))
        return tf.reduce_mean(x) * tf.get_variable('a', [])
    towers.build_towers(evaluated, (tf.placeholder(tf.float32, [4]),), None, 2, reuse=job.built)
    job.summaries = default_summaries(job.built, norms=False) + [tf.summary.scalar('outside', 3.)]
    job.run(tmp_path, 2)
    by_tag = {value.tag: value for _, event in events(tmp_path) for value in event.summary.value}
    assert set(by_tag) == OF_FOUR | {'train/loss', 'outside'}
    assert by_tag['loss'].simple_value == 1.5  # of the first tower, which has 1 and 2
    assert by_tag['train/loss'].simple_value == 109.375
    assert by_tag['kin/layer/kin/largest'].simple_value == 2.
    assert by_tag['layer/products'].histo.num == 2
    assert by_tag['picture/image'].image.width == 1


@pytest.mark.slow


def test_a_summary_of_the_model_with_the_name_of_a_default_one_is_refused():
    def add_summaries(x, product):
        with tf.name_scope('train'):
            tf.summary.scalar('loss', tf.reduce_mean(product))
    with pytest.raises(InvalidArgumentError, match="^the model has a summary 'train/loss' of its"):
        Job(add_summaries)


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
        Job().run(logs, 6, checkpoints=checkpoints)
    new = [event for name, event in events(logs) if name not in before]
    assert (new[0].session_log.status, new[0].step) == (tf.SessionLog.START, 5)
    assert [event.step for event in new[1:]] == [6, 8, 10]
    assert [event for path in logs.iterdir() for event in tf.train.summary_iterator(str(path))
            if event.graph_def]
    tensorboard = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    reader = tensorboard.EventAccumulator(str(logs))
    reader.Reload()
    assert [event.step for event in reader.Scalars('train/loss')] == [2, 4, 6, 8, 10]


def test_what_summaries_cannot_be_made_of(tmp_path):
    job = Job()
    without_optimizer = towers.build_towers(tf.reduce_mean, tf.ones([2]), None, 2)
    for make, text in [
            (lambda: default_summaries(without_optimizer), 'built without an optimizer'),
            (lambda: SummaryHook([3], job.global_step, str(tmp_path)), 'a list of what tf.summ'),
            (lambda: SummaryHook(job.summaries, job.global_step, str(tmp_path), 0),
             'summary_steps=0: expected a whole number')]:
        with pytest.raises(InvalidArgumentError, match=text):
            make()
