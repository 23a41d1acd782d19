"""trainer.job: the graph that `train.py` runs, its position in the stream, its machines."""

import json
import types

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from towers.graph.graph_walk import step_operations
import train
from trainer.arguments import compared_flags, make_cluster
from trainer.command_line import in_flags
from trainer.contradictions import contradiction
from trainer.flags import FLAGS
from trainer.job import START, Position, build_job, end_of_run, find_position
from trainer.job import make_setup as setup_of_flags
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


@pytest.mark.parametrize('flags, text', [
    (dict(report=6), '--report=6: the run ends with step 5: give a step before its end'),
    (dict(profile_steps='4,6'), '--profile_steps=4,6: the run ends with step 5: give steps before'),
    (dict(warmup_epochs=.5), '--warmup_epochs=0.5 is longer than the run, which has 0.3479 epochs')])
def test_what_would_come_after_the_end_of_the_run(flags, text):
    with tf.Graph().as_default(), flagsaver.flagsaver(train_steps=5, **flags):
        with pytest.raises(towers.InvalidArgumentError) as caught:
            build_job(make_setup(batch_size=100))
        assert str(caught.value).startswith(text)
        assert 'tower_0' not in '\n'.join(
            op.name for op in tf.get_default_graph().get_operations())  # before it is built


@pytest.mark.parametrize('flags, position, end', [
    (dict(train_steps=7), (0, 0), (7, 700)),
    (dict(train_epochs=2.), (0, 0), (29, 2900)),
    (dict(train_epochs=2.), (10, 400), (35, 2900)),  # ten steps of 40 before
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
    def settings(count, digest):
        return run_settings(20, types.SimpleNamespace(
            num_examples={'train': count}, names_digest=lambda split: split + digest))
    FLAGS.train_dir = str(tmp_path)
    settings(60, '1a').write()
    assert [each.text for each in settings(90, '2b').compare()] == [
        'number of training examples: 90, was 60',
        'digest of the names of training files: train2b, was train1a']


# ---- train.py's flags for several machines, as far as one process shows it -----------------------

RING = json.dumps({'cluster': {'worker': ['a:1', 'b:2']}, 'task': {'type': 'worker', 'index': 1}})


@pytest.mark.parametrize('given, expected', [
    (dict(batch_size='auto'), '--batch_size=auto runs steps of one machine'),
    (dict(mode='eval'), '--cluster is of no use with --mode=eval'),
    (dict(synchronous=False), '--synchronous is of no use with --cluster=ring: it goes with ps')])
def test_what_does_not_go_with_a_cluster(given, expected, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', RING)
    with flagsaver.flagsaver(**dict(given, cluster='ring')):
        assert contradiction(set(given) | {'cluster'}).startswith(expected)


@pytest.mark.parametrize('given, tf_config, expected', [
    (dict(cluster='ps'), '{"cluster": {"worker": ["a:1"], "ps": ["c:1"]}, "task": {"type": "ps", '
     '"index": 0}}', 'ps 0 of 1 builds no towers: it has no plan'),
    (dict(cluster='ring'), '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", '
     '"index": 0}}', 'evaluator 0 builds no towers: it has no plan'),
    (dict(cluster='ring', job_name='evaluator'), '',
     'an evaluator builds no towers: it has no plan')])
def test_who_builds_no_towers_has_no_plan_and_ends_without_an_error(
        given, tf_config, expected, monkeypatch, capsys):
    monkeypatch.setenv('TF_CONFIG', tf_config)
    with flagsaver.flagsaver(plan_only=True, **given):
        assert contradiction(set(given)) is None
        assert train.train(types.SimpleNamespace(batch_size=4, dataset=None)) == 0
    assert capsys.readouterr().out.strip() == expected


def test_the_cluster_is_that_of_tf_config(monkeypatch):
    monkeypatch.setenv('TF_CONFIG', RING)
    with flagsaver.flagsaver(cluster='ring'):
        cluster = make_cluster()
        assert (cluster.workers, cluster.rank) == (('a:1', 'b:2'), 1)
    with flagsaver.flagsaver():
        assert make_cluster() is None
    monkeypatch.setenv('TF_CONFIG', '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": '
                                    '"worker"}}')
    with flagsaver.flagsaver(cluster='ring'), pytest.raises(towers.InvalidArgumentError) as error:
        make_cluster()
    assert in_flags(str(error.value)) == (
        'TF_CONFIG has 2 tasks of the job worker, and nothing says which of them this process is: '
        'give an "index" in the "task".')


def test_workers_compare_every_flag_that_changes_the_numbers():
    compared = set(compared_flags())
    assert {'momentum', 'warmup_epochs', 'decay_epochs', 'decay_rate', 'base_batch_size',
            'weight_decay', 'remainder', 'augment', 'dataset', 'image_size', 'optimizer',
            'seed', 'train_steps', 'train_epochs', 'stop_at_accuracy'} <= compared
    # Each machine's own, or compared as what they come to.
    assert not compared & {'data_dir', 'train_dir', 'devices', 'batch_size', 'log_every', 'copies'}


def test_a_worker_that_saves_nothing_exports_nothing(monkeypatch, tmp_path):
    """Else it writes the same SavedModel as the chief, at the same time."""
    monkeypatch.setattr(train, 'make_cluster',
                        lambda: towers.Cluster('ring', ['a:1', 'b:2'], rank=1))
    monkeypatch.setattr(train, 'build_job', lambda *given, **named: None)
    monkeypatch.setattr(train.training, 'work', lambda *given: 0)
    for name in ('disable_v2_behavior', 'enable_resource_variables'):  # of the whole process
        monkeypatch.setattr(train.tf, name, lambda: None)
    with flagsaver.flagsaver(cluster='ring', export_dir=str(tmp_path / 'export'),
                             train_dir=str(tmp_path / 'none')):
        assert train.main([]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_process_has_the_threads_of_its_flag(runner, tmp_path):
    """The plan would say that the number has no effect, if the input had made others before."""
    shown = runner.run(tmp_path, ['--plan_only', '--plan', '--config={"intra_op_threads": 3}'])
    assert "3 intra-op and TensorFlow's choice of inter-op threads" in shown.stdout
