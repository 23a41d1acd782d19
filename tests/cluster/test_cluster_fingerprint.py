"""What workers compare before they train together: each thing that has to agree, named."""

import copy

import pytest

from towers.cluster.fingerprint import difference

OWN = {'kind': 'ring', 'workers': ['a:1', 'b:1'], 'ps': [], 'synchronous': True,
       'backup_workers': 0, 'tensorflow': '2.21.0', 'towers': 2, 'reduction': 'sum',
       'examples': 8, 'optimizer': 'AdamOptimizer', 'settings': {'seed': 1},
       'variables': [['w', 'float32', '(2, 3)'], ['b', 'float32', '(3,)']]}


def test_two_alike():
    assert difference(OWN, copy.deepcopy(OWN)) is None


@pytest.mark.parametrize('key, value, text', [
    ('kind', 'ps', 'its kind of cluster is ps, and that of worker 0 ring'),
    ('workers', ['a:1'], 'its list of workers is a:1, and that of worker 0 a:1, b:1'),
    ('ps', ['c:1'], 'its list of parameter servers is c:1, and that of worker 0 empty'),
    ('synchronous', False, 'synchronous is False, and that of worker 0 True'),
    ('backup_workers', 1, 'backup_workers is 1, and that of worker 0 0'),
    ('tensorflow', '1.15.5', 'its TensorFlow is 1.15.5, and that of worker 0 2.21.0'),
    ('towers', 1, 'its number of towers is 1, and that of worker 0 2'),
    ('reduction', 'mean', 'its reduction is mean, and that of worker 0 sum'),
    ('examples', None, 'its number of examples a step is not given, and that of worker 0 8'),
    ('optimizer', 'Ftrl', 'its optimizer is Ftrl, and that of worker 0 AdamOptimizer'),
    ('settings', {'seed': 2}, 'its seed is 2, and that of worker 0 1'),
    ('settings', {}, 'its seed is not given, and that of worker 0 1'),
    ('variables', OWN['variables'][:1], "its model is another one: variable 'b' is missing, and "
     'that of worker 0 float32 (3,)'),
    ('variables', OWN['variables'] + [['c', 'int64', '()']], "its model is another one: variable "
     "'c' is int64 (), and that of worker 0 missing")])
def test_what_differs_is_named(key, value, text):
    assert difference(OWN, dict(OWN, **{key: value})) == text
