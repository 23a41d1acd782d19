"""towers.cluster: a device of a job that there is no session of is refused before the build."""

import json

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from towers.placement.devices import check_job

NO_CLUSTER = 'this program has no cluster (TF_CONFIG is not set), so its one job is localhost. '


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)


def refusal(name):
    """The text of the error for a device; None where it is taken."""
    try:
        check_job(name)
    except towers.DeviceError as error:
        return str(error)
    return None


@pytest.mark.parametrize('name', ['/device:CPU:0', '/device:GPU:3', '/task:0/device:CPU:1'])
def test_devices_of_this_process(name):
    assert refusal(name) is None


@pytest.mark.parametrize('name, shown, local', [
    ('/job:worker/task:0/device:CPU:0', '/job:worker/task:0/cpu:0', '/cpu:0'),
    ('/job:ps/device:GPU:1', '/job:ps/gpu:1', '/gpu:1'),
    ('/job:localhost/task:1/device:CPU:0', '/job:localhost/task:1/cpu:0', '/cpu:0'),
    ('/task:2/device:CPU:0', '/task:2/cpu:0', '/cpu:0')])
def test_a_job_without_a_cluster(name, shown, local):
    assert refusal(name) == (
        '%s does not exist: %sName %s, or pass resolve_devices(…, check=False) to build the '
        'graph for a session that has it.' % (shown, NO_CLUSTER, local))


@pytest.mark.parametrize('tasks', [['a:1', 'b:1'], {'0': 'a:1', '1': 'b:1'}])
def test_jobs_and_tasks_of_the_cluster(monkeypatch, tasks):
    monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': {'ps': ['c:1'], 'worker': tasks}}))
    assert refusal('/job:worker/task:1/device:GPU:0') is None
    assert refusal('/job:ps/device:CPU:0') is None
    assert refusal('/job:worker/task:2/device:CPU:0').startswith(
        "/job:worker/task:2/cpu:0 does not exist: TF_CONFIG's cluster has 1 task of job 'ps', 2 "
        "tasks of job 'worker'. Name a device of one of them, or pass resolve_devices(…, check=")
    assert refusal('/job:evaluator/task:0/device:CPU:0') is not None


@pytest.mark.parametrize('text', ['', '{', '[]', '{"cluster": 3}', '{"cluster": {}}'])
def test_a_configuration_that_names_no_cluster(monkeypatch, text):
    monkeypatch.setenv('TF_CONFIG', text)
    assert NO_CLUSTER in refusal('/job:worker/task:0/device:CPU:0')


@pytest.mark.parametrize('arguments', [
    {'devices': '/job:worker/task:0/cpu:0,/cpu:1'},
    {'devices': 2, 'variables': towers.VariablePlacement('/job:ps/task:0/cpu:0')}])
def test_towers_are_not_built_for_it(arguments, graph):
    batch = samples.vectors(4)
    before = [op.name for op in graph.get_operations()]
    with pytest.raises(towers.DeviceError, match='/job:.* does not exist: this program has no c'):
        towers.build_towers(samples.linear, batch, samples.sgd(), **arguments)
    assert [op.name for op in graph.get_operations()] == before
    assert not tf.global_variables()
    arguments['devices'] = towers.resolve_devices(arguments['devices'], check=False)
    built = towers.build_towers(samples.linear, batch, samples.sgd(), **arguments)
    assert len(built.devices) == 2


def test_a_cluster_of_which_some_tasks_alone_are_named(monkeypatch):
    monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': {'worker': {'1': 'a:1', '3': 'b:2'}}}))
    for task in (1, 3):
        check_job('/job:worker/task:%d/device:GPU:0' % task)
    for task in (0, 2):
        assert 'does not exist' in refusal('/job:worker/task:%d/device:GPU:0' % task)
