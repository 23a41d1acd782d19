"""train.py's flags for several machines, as far as one process shows it."""

import json
import types

from absl.testing import flagsaver
import pytest

import towers
import train
from trainer.cluster import compared_flags, make_cluster, workers_a_step
from trainer.command_line import in_flags
from trainer.contradictions import contradiction
from trainer.flags import FLAGS
from trainer.job import build_job, make_setup
from trainer.run_settings import run_settings


@pytest.fixture(autouse=True)
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


RING = json.dumps({'cluster': {'worker': ['a:1', 'b:2']}, 'task': {'type': 'worker', 'index': 1}})


@pytest.mark.parametrize('given, expected', [
    (dict(batch_size='auto'), '--batch_size=auto runs steps of one machine'),
    (dict(remainder='weight'), '--remainder=weight ends an epoch'),
    (dict(mode='eval'), '--cluster is of no use with --mode=eval'),
    (dict(backup_workers=1), '--backup_workers is of no use with --cluster=ring'),
    (dict(synchronous=False), '--synchronous is of no use with --cluster=ring: it goes with ps')])
def test_what_does_not_go_with_a_cluster(given, expected, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', RING)
    with flagsaver.flagsaver(**dict(given, cluster='ring')):
        assert contradiction(set(given) | {'cluster'}).startswith(expected)


def test_options_of_a_cluster_without_one():
    assert contradiction({'dead_after'}) == (
        '--dead_after is of no use with --cluster=: it goes with ring or ps or horovod')


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
        'the cluster has 2 tasks of the job worker, and nothing says which of them this process '
        'is: give an "index" in the "task" of TF_CONFIG.')


@pytest.mark.slow
def test_the_rate_sees_all_machines_and_the_step_counts_their_examples():
    import datasets
    with flagsaver.flagsaver(cluster='ring', lr_scaling='linear', batch_size=10, num_towers=2,
                             train_steps=5, base_learning_rate=0.001, warmup_epochs=1):
        cluster = towers.Cluster('ring', ['a:1', 'b:2', 'c:3'], rank=1)
        setup = make_setup(datasets.get_dataset('digits'))
        towers.mend_slim()
        job = build_job(setup, cluster=cluster)
    assert job.counts.batch_size == 30
    assert '0.006 = 0.001 x 6, warm-up from 0.001' in job.built.plan.line('learning rate')
    assert job.built.machines.counted(10) == 30
    assert job.built.plan.all_towers == 6


def test_a_run_on_another_number_of_workers_says_so(tmp_path):
    run_settings(10, workers=2).begin(str(tmp_path))
    assert run_settings(10, workers=2).compare(str(tmp_path)) == []
    assert list(map(str, run_settings(10, workers=3).compare(str(tmp_path)))) == [
        'number of workers: 3, was 2: changes the run from here on']


def test_a_step_is_of_as_many_workers_as_it_waits_for():
    workers, ps = ['a:1', 'b:2', 'c:3'], ['d:4']
    assert [workers_a_step(cluster) for cluster in (
        None, towers.Cluster('ring', workers), towers.Cluster('ps', workers, ps),
        towers.Cluster('ps', workers, ps, backup_workers=1),
        towers.Cluster('ps', workers, ps, synchronous=False))] == [1, 3, 3, 2, 1]


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
    monkeypatch.setattr(train, 'work', lambda *given: 0)
    for name in ('disable_v2_behavior', 'enable_resource_variables'):  # of the whole process
        monkeypatch.setattr(train.tf, name, lambda: None)
    with flagsaver.flagsaver(cluster='ring', export_dir=str(tmp_path / 'export'),
                             train_dir=str(tmp_path / 'none')):
        assert train.main([]) == 0
    assert not list(tmp_path.iterdir())
