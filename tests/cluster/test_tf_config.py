"""`TF_CONFIG`: what can be read of it, and which task a process is."""

import json

import pytest

from towers.cluster.tf_config import parse_tf_config, place_of
from towers.errors import ClusterError

ONE, TWO, THREE = 'a:1', 'b:2', 'c:3'
CHIEF = {'chief': [ONE], 'worker': [TWO, THREE], 'ps': ['d:4'], 'evaluator': []}
PLAIN = {'chief': [], 'worker': [ONE, TWO], 'ps': [], 'evaluator': []}
LONE = {'chief': [ONE], 'worker': [TWO], 'ps': [], 'evaluator': []}


def test_what_is_there():
    text = json.dumps({'cluster': {'master': [ONE], 'worker': {'1': THREE, '0': TWO},
                                   'ps': ['d:4'], 'evaluator': None},
                       'task': {'type': 'master', 'index': '0'}, 'environment': 'cloud'})
    assert parse_tf_config(text) == (CHIEF, ('chief', 0))


@pytest.mark.parametrize('text, task', [
    ('{}', None), (' \n', None), ('{"task": null, "cluster": null}', None),
    ('{"task": {"type": "worker"}}', ('worker', None)),
    ('{"task": {"type": "ps", "index": null}}', ('ps', None))])
def test_what_is_not_there(text, task):
    jobs, found = parse_tf_config(text)
    assert set(sum(jobs.values(), [])) == set() and found == task


@pytest.mark.parametrize('text, expected', [
    ('[]', 'it is no object {…}'),
    ('{"cluster": []}', '"cluster" is no object'), ('{"task": []}', '"task" is no object'),
    ('{"a":' * 100000, 'nested too deeply'),
    ('{"cluster": {"worker": "a:1"}}', '\'a:1\' of "worker" is no list'),
    ('{"cluster": {"worker": {"x": "a:1"}}}', "the index 'x' is no whole number"),
    ('{"task": {"type": "worker", "index": "\u0663"}}', 'is no whole number'),
    ('{"task": {"type": "worker", "index": NaN}}', 'the index nan is no whole number')])
def test_what_cannot_be_read_is_said_without_words_of_python(text, expected):
    with pytest.raises(ClusterError) as error:
        parse_tf_config(text)
    found = str(error.value)
    assert 'cannot be read (' in found and expected in found
    assert found.startswith('TF_CONFIG=%r%s cannot' % (text[:80], '…' * (len(text) > 80)))
    assert 'expected {"cluster": {"worker": ["host:port"]}' in found
    assert 'attribute' not in found and 'argument' not in found and len(found) < 300


@pytest.mark.parametrize('text, expected', [
    ('{"cluster": {"chief": ["a:1", "b:2"]}}', '2 chiefs.*put the others under "worker"'),
    ('{"task": {"type": ["worker"]}}', 'is of type .\'worker\'.: expected one of chief, worker')])
def test_what_contradicts_itself(text, expected):
    with pytest.raises(ClusterError, match=expected):
        parse_tf_config(text)


@pytest.mark.parametrize('jobs, task, given, expected', [
    # TF_CONFIG alone, which counts its workers without the chief.
    (CHIEF, ('chief', 0), {}, ('worker', 0)), (CHIEF, ('worker', 1), {}, ('worker', 2)),
    (CHIEF, ('ps', None), {}, ('ps', 0)), (LONE, ('worker', None), {}, ('worker', 1)),
    (PLAIN, ('evaluator', None), {}, ('evaluator', 0)),
    # The words of the flags are those of TF_CONFIG where its list is in force.
    (CHIEF, ('worker', 0), dict(job='chief'), ('worker', 0)),
    (CHIEF, None, dict(index=1), ('worker', 2)),
    (CHIEF, ('worker', 1), dict(job='worker'), ('worker', 2)),
    # Of another list the numbers are its own.
    (CHIEF, ('worker', 0), dict(workers=[ONE, TWO, THREE], job='worker', index=0), ('worker', 0)),
    (CHIEF, ('chief', 0), dict(workers=[ONE, TWO, THREE]), ('worker', 0)),
    (PLAIN, None, dict(workers=[ONE, TWO], ps=['x:1', 'y:2'], job='ps', index=1), ('ps', 1)),
    (PLAIN, None, dict(workers=[ONE, TWO], job='evaluator'), ('evaluator', 0))])
def test_the_place_is_named_in_the_words_of_the_list_in_force(jobs, task, given, expected):
    assert place_of(jobs, task, **given) == expected


@pytest.mark.parametrize('jobs, task, given, expected', [
    (PLAIN, ('worker', None), {}, '2 tasks of the job worker, and nothing says which'),
    (CHIEF, ('chief', 0), dict(job='worker'), 'give a rank, from 0, or an "index"'),
    (PLAIN, None, dict(workers=[ONE, TWO]), '2 tasks of the job worker'),
    (PLAIN, None, {}, 'TF_CONFIG has a cluster and no task'),
    (PLAIN, ('worker', 2), {}, "TF_CONFIG's task is worker 2, and its cluster has 2 of them: num"),
    (PLAIN, ('ps', 0), {}, "TF_CONFIG's task is ps 0, and its cluster has 0 of them: name one under"
     " 'ps'"),
    (LONE, ('worker', 0), dict(index=1), 'this process is worker 1, and its cluster has 1 of them'),
    (PLAIN, None, dict(workers=[ONE, TWO], job='chief', index=2), 'this process is worker 2')])
def test_no_task_is_guessed(jobs, task, given, expected):
    with pytest.raises(ClusterError, match=expected):
        place_of(jobs, task, **given)
