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
from trainer.hooks import EndHook
from trainer.job import build_job, make_setup
from trainer.resuming import run_settings, settings_of_workers


@pytest.fixture(autouse=True)
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


RING = json.dumps({'cluster': {'worker': ['a:1', 'b:2']}, 'task': {'type': 'worker', 'index': 1}})


@pytest.mark.parametrize('given, expected', [
    (dict(fingerprint=True), '--fingerprint sums up'),
    (dict(audit_runtime=True), '--audit_runtime looks'),
    (dict(variable_device='auto'), '--variable_device=auto times'),
    (dict(batch_size='auto'), '--batch_size=auto runs steps of one machine'),
    (dict(remainder='weight'), '--remainder=weight ends an epoch'),
    (dict(mode='eval', cluster='ring'), '--cluster is of no use with --mode=eval'),
    (dict(backup_workers=1), '--backup_workers is of no use with --cluster=ring'),
    (dict(synchronous=False), '--nosynchronous is of no use with --cluster=ring: it goes with ps'),
    (dict(synchronous=True), '--synchronous is of no use with --cluster=ring: it goes with ps')])
def test_what_does_not_go_with_a_cluster(given, expected):
    with flagsaver.flagsaver(**dict(given, cluster='ring')):
        assert contradiction(set(given)).startswith(expected)


def test_flags_of_a_cluster_without_one():
    with flagsaver.flagsaver():
        assert contradiction({'worker_hosts'}) == (
            '--worker_hosts is of no use without --cluster')


@pytest.mark.parametrize('cluster, expected', [
    ('', None), ('ring', '--cluster=ring does not say how many workers the run has'),
    ('ps', '--cluster=ps does not say how many workers the run has, by which an evaluator knows '
           'its last step: set TF_CONFIG, or give --worker_hosts and --ps_hosts')])
def test_an_evaluator_needs_the_workers_of_its_run(cluster, expected, monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    with flagsaver.flagsaver(job_name='evaluator', cluster=cluster):
        why = contradiction({'job_name', 'cluster'})
    assert why is None if expected is None else why.startswith(expected)


@pytest.mark.parametrize('job, given, expected', [
    ('ps', dict(cluster='ps', ps_hosts='c:1'), 'ps 0 of 1 builds no towers: it has no plan'),
    ('evaluator', dict(cluster='ring'), 'evaluator 0 builds no towers: it has no plan'),
    ('evaluator', dict(worker_hosts=''), 'an evaluator builds no towers: it has no plan')])
def test_who_builds_no_towers_has_no_plan_and_ends_without_an_error(
        job, given, expected, monkeypatch, capsys):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    given = dict(dict(worker_hosts='a:1,b:1', job_name=job, plan_only=True), **given)
    with flagsaver.flagsaver(**given):
        assert train.train(types.SimpleNamespace(batch_size=4, dataset=None)) == 0
    assert capsys.readouterr().out.strip() == expected


def test_flags_override_tf_config(monkeypatch):
    monkeypatch.setenv('TF_CONFIG', RING)
    with flagsaver.flagsaver(cluster='ring'):
        cluster = make_cluster()
        assert (cluster.workers, cluster.rank) == (('a:1', 'b:2'), 1)
    with flagsaver.flagsaver(cluster='ps', worker_hosts='x:1, y:2', ps_hosts='z:3', job_name='ps',
                             task_index=0, synchronous=False):
        cluster = make_cluster()
        assert (cluster.workers, cluster.ps, cluster.job, cluster.rank, cluster.synchronous) == (
            ('x:1', 'y:2'), ('z:3',), 'ps', 0, False)
    with flagsaver.flagsaver():
        assert make_cluster() is None


CHIEF = ('{"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", '
         '"index": 0}}')


@pytest.mark.parametrize('given, workers, rank', [
    ({}, ('a:1', 'b:2'), 1), (dict(job_name='worker', task_index=0), ('a:1', 'b:2'), 1),
    (dict(job_name='chief', task_index=0), ('a:1', 'b:2'), 0),
    (dict(job_name='chief'), ('a:1', 'b:2'), 0),
    (dict(job_name='worker', task_index=0, worker_hosts='x:1,y:2'), ('x:1', 'y:2'), 0)])
def test_flags_name_the_task_as_the_list_in_force_does(given, workers, rank, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', CHIEF)
    with flagsaver.flagsaver(cluster='ring', **given):
        cluster = make_cluster()
    assert (cluster.workers, cluster.job, cluster.rank) == (workers, 'worker', rank)


@pytest.mark.parametrize('given, expected', [
    (dict(worker_hosts='a:1,b:2', job_name='worker'),
     'the cluster has 2 tasks of the job worker, and nothing says which of them this process is: '
     'give --task_index, from 0, or an "index" in the "task" of TF_CONFIG.'),
    (dict(worker_hosts='a:1,b:2,', job_name='worker', task_index=0),
     '--worker_hosts=a:1,b:2, has a comma without an address: leave it out.'),
    (dict(worker_hosts='a:1', job_name='ps', task_index=0),
     "this process is ps 0, and its cluster has 0 of them: name one by --ps_hosts, or under 'ps' "
     'of TF_CONFIG (of --cluster=ps), or give this process another job')])
def test_what_the_flags_leave_open_is_refused(given, expected, monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    with flagsaver.flagsaver(cluster='ring', **given):
        with pytest.raises(towers.InvalidArgumentError) as error:
            make_cluster()
    assert in_flags(str(error.value)).startswith(expected)


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
    assert '0.006 = 0.001 x 6, warm-up from 0.001' in job.built.plan.learning_rate
    assert job.built.machines.counted(10) == 30
    assert job.built.plan.all_towers == 6
    assert settings_of_workers(cluster, job)[:2] == [
        ('number of workers', 3), ('examples of all workers a step', 30)]
    assert settings_of_workers(None, job)[0] == ('number of workers', 1)


def test_a_run_on_another_number_of_workers_says_what_that_changes(tmp_path):
    def settings(workers, rate, batch_size=10):
        plan = types.SimpleNamespace(learning_rate=rate)
        job = types.SimpleNamespace(counts=types.SimpleNamespace(batch_size=batch_size * workers),
                                    built=types.SimpleNamespace(plan=plan))
        cluster = towers.Cluster('ring', ['a:1', 'b:2', 'c:3'][:workers]) if workers > 1 else None
        return run_settings(batch_size, settings_of_workers(cluster, job))
    settings(2, '0.002 = 0.001 x 2').begin(str(tmp_path))
    differences, _ = settings(3, '0.003 = 0.001 x 3').compare(str(tmp_path))
    assert list(map(str, differences)) == [
        'number of workers: 3, was 2: changes the run from here on',
        'examples of all workers a step: 30, was 20: changes the run from here on',
        "learning rate of all workers: 0.003 = 0.001 x 3, was 0.002 = 0.001 x 2: changes the run "
        'from here on']
    assert settings(2, '0.002 = 0.001 x 2').compare(str(tmp_path)) == ([], None)
    differences, _ = settings(1, '0.001').compare(str(tmp_path))  # back on one machine
    assert [each.text for each in differences] == [
        'number of workers: 1, was 2', 'examples of all workers a step: 10, was 20',
        'learning rate of all workers: 0.001, was 0.002 = 0.001 x 2']
    settings(1, '0.001').begin(str(tmp_path))
    differences, _ = settings(3, '0.003 = 0.001 x 3').compare(str(tmp_path))
    assert [each.text for each in differences] == [
        'number of workers: 3, was 1', 'examples of all workers a step: 30, was 10',
        'learning rate of all workers: 0.003 = 0.001 x 3, was 0.001']
    differences, _ = settings(1, '0.002', 20).compare(str(tmp_path))
    assert [each.text for each in differences] == ['--batch_size=20, was 10']


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
            'seed', 'update_ops', 'train_steps', 'train_epochs', 'stop_at_accuracy'} <= compared
    # Each machine's own, or compared as what they come to.
    assert not compared & {'data_dir', 'train_dir', 'devices', 'batch_size', 'log_every', 'copies'}


@pytest.mark.parametrize('rank, step, stopped_by, is_told, expected', [
    (0, 629, 'worker 1 was told to stop (SIGTERM)', True,
     'stopped at step 629 of 1000: worker 1 was told to stop (SIGTERM)'),
    (1, 629, None, True, 'stopped at step 629 of 1000: worker 0 (a:1), the chief, has ended the '
     'run'),
    (0, 629, None, False, None), (1, 1000, None, True, None), (1, None, None, True, None)])
def test_a_run_that_ends_before_its_last_step_says_why(rank, step, stopped_by, is_told, expected):
    signals = types.SimpleNamespace(reason=lambda: stopped_by, is_told=is_told)
    job = types.SimpleNamespace(counts=types.SimpleNamespace(last_step=1000, global_step=None))
    end = EndHook(towers.Cluster('ring', ['a:1', 'b:2'], rank=rank), job, signals)
    if step is not None:
        end.end(types.SimpleNamespace(run=lambda unused_fetch: step))
    assert end.reason() == expected


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
