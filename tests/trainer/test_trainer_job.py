"""trainer.job: the graph that `train.py` runs, and where in the stream of examples it begins."""

import types

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.graph.graph_walk import step_operations
from trainer.arguments import session_config
from trainer.flags import FLAGS
from trainer.job import build_job
from trainer.job import make_setup as setup_of_flags
from trainer.job import START, Position, end_of_run, find_position
from trainer.run_settings import check_classes, run_settings


@pytest.fixture(autouse=True)
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


def make_setup(**changed):
    towers.mend_slim()
    return setup_of_flags(datasets.get_dataset('digits'))._replace(**changed)


@pytest.mark.slow
def test_the_batch_of_the_setup_is_built_whatever_the_flag():
    with flagsaver.flagsaver(batch_size='auto', lr_scaling='linear', base_batch_size=10,
                             train_epochs=2.):
        job = build_job(make_setup(batch_size=40), with_evaluation=False)
    assert str(job.built.plan).startswith('2 towers, batch 40 = 2 x 20\n')
    assert '0.004 = 0.001 x 4' in job.built.plan.line('learning rate')
    assert job.evaluation is None
    counts = job.counts
    assert (counts.batch_size, counts.examples_per_epoch, counts.last_step) == (40, 1437, 72)
    assert [variable.op.name for variable in (counts.global_step, counts.examples)] == [
        'global_step', 'examples_seen']
    with tf.Session(config=session_config(job.built)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(job.iterator.initializer)
        for _ in range(2):
            session.run(job.train_op)
        assert session.run([counts.global_step, counts.examples]) == [2, 80]


@pytest.mark.slow
def test_the_worker_that_updates_the_weights_updates_their_averages():
    found = []
    for rank in (0, 1):
        with tf.Graph().as_default(), flagsaver.flagsaver(
                cluster='ps', average_decay=.9, train_steps=5):
            job = build_job(
                make_setup(batch_size=10), with_evaluation=False,
                cluster=towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], rank=rank))
            found.append(sum('ExponentialMovingAverage' in op.name and op.type.startswith('Assign')
                             for op in step_operations([job.train_op])))
    assert found == [8, 0]


@pytest.mark.parametrize('flags, position, end', [
    (dict(train_steps=7), (0, 0), (7, 700)),
    (dict(train_epochs=2.), (0, 0), (29, 2900)),
    (dict(train_epochs=2.), (10, 400), (35, 2900)),  # ten steps of 40 before
    (dict(train_epochs=2.), (80, 3200), (80, 3200)),
    (dict(train_epochs=.07, n=100, batch_size=1), (0, 0), (7, 7)),
    (dict(train_epochs=1., batch_size=90), (5, 500), (16, 1490)),  # five steps of 100 before
    (dict(train_epochs=1., batch_size=90, remainder='drop'), (5, 500), (15, 1400)),
    (dict(train_steps=17, batch_size=90), (5, 500), (17, 1580))])
def test_the_end_of_a_run_is_counted_from_its_position(flags, position, end):
    from datasets.epochs import Epochs
    flags = dict(dict(n=1437, batch_size=100, remainder='carry'), **flags)
    epochs = Epochs(*[flags.pop(name) for name in ('n', 'batch_size', 'remainder')])
    with flagsaver.flagsaver(**flags):
        assert end_of_run(epochs, Position(*position)) == end


def test_a_worker_that_saves_nothing_knows_where_the_run_is(tmp_path):
    """Else the end of a cosine, and of the run, would be another one than the chief's."""
    with tf.Graph().as_default(), tf.Session() as session:
        for name, value in (('global_step', 3), ('examples_seen', 150)):
            tf.get_variable(name, dtype=tf.int64, initializer=tf.constant(value, tf.int64))
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, str(tmp_path / 'model.ckpt'), 3)
    worker = towers.Cluster('ring', ['a:1', 'b:2'], rank=1)
    with flagsaver.flagsaver(train_dir=str(tmp_path)), towers.hold_directory(str(tmp_path)):
        assert find_position(worker) == Position(3, 150)
    with flagsaver.flagsaver(train_dir=str(tmp_path / 'none')):
        assert find_position(worker) == START


class OfFolders:
    """A data set with names of its classes."""

    num_examples = {'train': 60}

    def __init__(self, *classes):
        self.classes = classes


def test_other_classes_than_the_run_was_trained_on_are_refused(tmp_path):
    with flagsaver.flagsaver(train_dir=str(tmp_path), data_dir='flowers'):
        check_classes(OfFolders('daisy', 'rose'))  # no run
        run_settings(60, OfFolders('daisy', 'rose', 'tulip')).write()
        check_classes(OfFolders('rose'))  # a run that has saved nothing
        with tf.Session() as session:
            saved = tf.Variable(1.)
            session.run(saved.initializer)
            tf.train.Saver().save(session, str(tmp_path / 'model.ckpt'))
        check_classes(OfFolders('daisy', 'rose', 'tulip'))
        check_classes(object())  # without names
        with pytest.raises(datasets.DatasetError, match=(
                "the 3 classes of --data_dir=flowers are not the 3 .* class 0 is 'rose', and was "
                "'daisy'")):
            check_classes(OfFolders('rose', 'tulip', 'zdaisy'))
        with pytest.raises(datasets.DatasetError, match="class 3 is 'zinnia', and was none"):
            check_classes(OfFolders('daisy', 'rose', 'tulip', 'zinnia'))
        odd = OfFolders('a\nb', 'caf\udce9')  # a line break, and no UTF-8
        run_settings(60, odd).write()
        check_classes(odd)
        with pytest.raises(datasets.DatasetError, match=r"class 2 is 'rose', and was 'caf\\udce9'"):
            check_classes(OfFolders('a\nb', 'rose'))


def test_other_training_files_are_said(tmp_path):
    FLAGS.train_dir = str(tmp_path)

    def settings(count, digest):
        return run_settings(20, types.SimpleNamespace(
            num_examples={'train': count, 'test': 1}, names_digest=lambda split: split + digest))
    settings(60, '1a').write()
    assert settings(60, '1a').compare() == []
    assert list(map(str, settings(90, '2b').compare())) == [
        'number of training examples: 90, was 60: changes the run from here on',
        'digest of the names of training files: train2b, was train1a: changes the run from here on']
