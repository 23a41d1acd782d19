"""What workers compare before they train together: each thing that has to agree, named."""

import copy

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint

OWN = {'kind': 'ring', 'workers': ['a:1', 'b:1'], 'ps': [], 'synchronous': True,
       'backup_workers': 0, 'tensorflow': '2.21.0', 'towers': 2, 'reduction': 'sum',
       'examples': 8, 'optimizer': 'AdamOptimizer', 'settings': {'seed': 1},
       'variables': [['w', 'float32', '(2, 3)'], ['b', 'float32', '(3,)']],
       'gradients': [['w', 'dense float32'], ['b', 'dense float32']], 'state': ['s']}


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
     "'c' is int64 (), and that of worker 0 missing"),
    ('state', [], 'its state that training reads is empty, and that of worker 0 s')])
def test_what_differs_is_named(key, value, text):
    assert difference(OWN, dict(OWN, **{key: value})) == text


@pytest.mark.parametrize('fields, text', [
    ({}, 'its number of examples a step is 5, and that of worker 0 4'), ({'uneven': True}, None)])
def test_asynchronous_workers_have_batches_of_one_size(fields, text):
    """The chief counts the steps of all by its own batch."""
    def of_batch(rank, size):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'], rank=rank, synchronous=False,
                                     **fields)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x * tf.get_variable('w', [3])), tf.ones([size, 3]),
                tf.train.GradientDescentOptimizer(.5), 1, 'mean', cluster=cluster)
            return fingerprint(cluster, built, built.machines.same_examples)
    assert difference(of_batch(0, 4), of_batch(1, 5)) == text
    assert difference(of_batch(0, 4), of_batch(1, 4)) is None


def test_a_variable_that_a_worker_of_parameter_servers_alone_has():
    """The chief may have more: it gives them their values."""
    fewer, more = [dict(OWN, servers=dict.fromkeys(names, 0)) for names in ('w', ['w', 'mine'])]
    assert difference(more, fewer) is None
    assert difference(fewer, more).startswith("it has the variable 'mine', and worker 0")
