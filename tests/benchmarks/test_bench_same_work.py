"""benchmarks/same_work and the comparison in benchmarks/contest: wrong peers are found."""

import tensorflow.compat.v1 as tf
import numpy as np
import pytest

from benchmarks import contest, graph_peers, programs, same_work, turns
from benchmarks.workloads import WORKLOADS, initial_value

RIGHT = {'losses': [2., 1.9, 1.8], 'checksum': {'change': 3., 'projection': -1.}}


def changed(**values):
    return dict(RIGHT, **values)


def test_equal_up_to_rounding():
    assert same_work.difference(RIGHT, changed(losses=[2.001, 1.9, 1.8])) is None


@pytest.mark.parametrize('other, text', [
    (changed(losses=[2., 1.9, 1.7]), 'loss of step 3 is 1.7, not 1.8'),
    (changed(losses=[2., float('nan'), 1.8]), 'loss of step 2 is nan, not 1.9'),
    (changed(losses=[2., 1.9]), 'only 2 of 3 losses'),
    (changed(checksum={'change': 6., 'projection': -1.}), 'change of the weights is 6, not 3'),
    (changed(checksum={'change': 3., 'projection': 1.}), 'projection of the weights is 1, not -1'),
])
def test_what_differs_is_named(other, text):
    assert same_work.difference(RIGHT, other) == text


def test_only_the_first_loss_where_no_more_is_comparable():
    other = {'losses': [2., 5., 9.], 'checksum': {'change': 60., 'projection': 7.}}
    assert same_work.difference(RIGHT, other, first_loss_only=True) is None
    other['losses'][0] = 3.
    assert 'step 1' in same_work.difference(RIGHT, other, first_loss_only=True)


def contender(label, record):
    made = turns.Contender(label, [{}])
    made.losses, made.checksum = record['losses'], record['checksum']
    return made


def test_a_wrong_peer_is_taken_out_loudly():
    wrong = contender('slim', changed(checksum={'change': 6., 'projection': -2.}))
    others = [contender('one_device@0', RIGHT), contender('towers', RIGHT)]
    contest.compare(others + [wrong], WORKLOADS['small_conv'])
    assert wrong.failure == ('DIFFERS from one_device@0: change of the weights is 6, not 3')
    assert [each.failure for each in others] == [None, None]


def test_wrong_towers_are_taken_out_not_the_peer():
    wrong = contender('towers', changed(losses=[2., 1., 1.]))
    peer = contender('recipe', RIGHT)
    contest.compare([wrong, peer], WORKLOADS['digits'])
    assert 'DIFFERS from recipe' in wrong.failure and peer.failure is None


def test_batch_norm_lets_one_device_differ_a_little_and_no_more():
    whole = contender('one_device@0', changed(losses=[2.2, 0., 0.]))
    contest.compare([contender('recipe', RIGHT), whole], WORKLOADS['digits'])
    assert whole.failure is None
    far = contender('one_device@1', changed(losses=[20., 0., 0.]))
    contest.compare([contender('recipe', RIGHT), far], WORKLOADS['digits'])
    assert 'DIFFERS' in far.failure


@pytest.mark.parametrize('other, out', [
    (changed(losses=[2., 1.905, 1.8]), False), (changed(losses=[2., 1.92, 1.8]), True),
    (changed(checksum={'change': 3., 'projection': -0.3}), False),
    (changed(checksum={'change': 3., 'projection': 0.}), True),
    (changed(checksum={'change': 3.1, 'projection': -1.}), True)])
def test_deep_networks_multiply_rounding_but_not_the_length_of_a_change(other, out):
    peer = contender('slim', other)
    contest.compare([contender('recipe', RIGHT), peer], WORKLOADS['resnet50'])
    assert bool(peer.failure) == out


def program_of(peer, workload=WORKLOADS['tiny'], num_towers=2, **options):
    tf.get_variable_scope().set_use_resource(True)
    parts = graph_peers.BUILDERS[peer](workload, workload.arrays(16), num_towers, **options)
    return programs.GraphProgram(parts)


def record_of(program):
    try:
        return {'losses': [program.step() for _ in range(3)],
                'checksum': programs.checksum(program.trainable_weights())}
    finally:
        program.close()


@pytest.fixture
def one_device():
    with tf.Graph().as_default():
        return record_of(program_of('one_device', num_towers=1))


@pytest.mark.parametrize('peer', ['towers', 'recipe', 'chain'] + [
    pytest.param(peer, marks=pytest.mark.slow) for peer in ('slim', 'add_n')])
def test_the_graph_peers_do_what_one_device_does(peer, one_device):
    assert same_work.difference(one_device, record_of(program_of(peer))) is None


@pytest.mark.parametrize('options', [
    {'variable_device': 'replicated', 'all_reduce': 'collective'},
    pytest.param({'variable_device': 'balanced'}, marks=pytest.mark.slow)])
def test_placements_do_what_one_device_does(options, one_device):
    assert same_work.difference(one_device, record_of(program_of('towers', **options))) is None


def test_a_peer_that_forgets_to_divide_its_rate_is_found(one_device):
    forgetful = WORKLOADS['tiny']._replace(learning_rate=2 * WORKLOADS['tiny'].learning_rate)
    assert same_work.difference(one_device, record_of(program_of('recipe', forgetful)))


def test_checksum_of_unchanged_and_changed_weights():
    start = initial_value('a/weights', [3, 4])
    assert programs.checksum([('a/weights', start)]) == {'change': 0., 'projection': 0.}
    moved = start.copy()
    moved[0, 0] += 3.
    moved[2, 3] -= 4.
    assert programs.checksum([('a/weights', moved)])['change'] == pytest.approx(5., rel=1e-5)


def test_initial_values_depend_on_the_name_alone():
    assert np.array_equal(initial_value('a/weights', [2, 3]), initial_value('a/weights', [2, 3]))
    assert not np.array_equal(initial_value('a/weights', [2, 3]),
                              initial_value('b/weights', [2, 3]))
    assert np.all(initial_value('bn/gamma', [4]) == 1)


def test_the_chain_is_one_and_add_n_is_not():
    def added(peer):
        with tf.Graph().as_default() as graph:
            tf.get_variable_scope().set_use_resource(True)
            graph_peers.BUILDERS[peer](WORKLOADS['tiny'], WORKLOADS['tiny'].arrays(16), 4)
            return sorted(op.type for op in graph.get_operations()
                          if op.type in ('AddN', 'AddV2', 'Add', 'Pack')
                          and not op.name.startswith('tower_')
                          and 'Initializer' not in op.name)
    assert added('chain').count('AddN') == 1  # the mean loss; two variables, three additions each
    assert len(added('chain')) == 7
    assert added('add_n') == ['AddN'] * 3
    assert added('recipe').count('Pack') == 2


def test_batches_divide_and_towers_get_enough():
    assert WORKLOADS['small_conv'].batch_size(1) == 64
    assert WORKLOADS['small_conv'].batch_size(8) == 64
    assert WORKLOADS['small_conv'].batch_size(16) == 128
    assert WORKLOADS['dense'].batch_size(4) == 64
    assert WORKLOADS['digits'].batch_size(7) == 98
