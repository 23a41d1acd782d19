"""benchmarks/turns: spread, ratios, and the turns of contenders that need no process."""

import pytest

from benchmarks import contest, turns
from benchmarks.workloads import WORKLOADS


class Pretender(turns.Contender):
    """A contender that answers at once: so many seconds a step, and dies after so many turns."""

    def __init__(self, label, seconds, journal, dies_at=None):
        super(Pretender, self).__init__(label, [{}])
        self._a_step, self._journal, self._dies_at = seconds, journal, dies_at

    def run(self, count):
        self._journal.append((self.label, count))
        if self._dies_at is not None and len(self._journal) >= self._dies_at:
            raise turns.ContenderError('it died')
        return self._a_step, 2 * self._a_step, [[1.] * count]


def test_spread():
    assert turns.spread([3., 1., 10.]) == {'median': 3., 'least': 1., 'most': 10.}
    assert turns.spread([]) is None


def test_ratios_are_taken_round_by_round():
    # The second round was slow for both: that must not show.
    assert turns.ratios([1., 10., 1.2], [2., 20., 2.]) == {
        'median': 0.5, 'least': 0.5, 'most': 0.6}


def test_ratios_need_as_many_rounds():
    with pytest.raises(ValueError, match='2 rounds against 1'):
        turns.ratios([1., 2.], [1.])


def test_turns_alternate_and_take_equally_long():
    journal = []
    fast, slow = Pretender('fast', 0.01, journal), Pretender('slow', 0.1, journal)
    assert turns.take_turns([fast, slow], 2, 1.) == {'fast': 100, 'slow': 10}
    assert journal[4:] == [('fast', 100), ('slow', 10), ('slow', 10), ('fast', 100)]
    assert fast.seconds == [0.01, 0.01] and slow.cpu_seconds == [0.2, 0.2]


def test_a_turn_has_a_step_at_least_and_not_too_many():
    assert turns.take_turns([Pretender('slow', 60., [])], 1, 1.) == {'slow': 1}
    assert turns.take_turns([Pretender('fast', 1e-9, [])], 1, 1.) == {'fast': 500}


def test_one_that_dies_is_out_and_the_others_go_on():
    journal = []
    dies, stays = Pretender('dies', 0.1, journal, dies_at=6), Pretender('stays', 0.1, journal)
    turns.take_turns([stays, dies], 3, 0.1)
    assert dies.failure == 'it died'
    assert len(stays.seconds) == 3


def test_of_each_peer_the_fastest_thread_setting_goes_on():
    class Ready(Pretender):
        def start(self):
            journal.append(('start', self.label))

        def ask(self, command):
            return [{'change': 1., 'projection': 1.}]

    journal = []
    contenders = [Ready(label, seconds, journal) for label, seconds in (
        ('towers', 0.5), ('one_device@2', 1.), ('recipe@0', 0.8), ('recipe@1', 0.7),
        ('slim@0', 0.25), ('slim@1', 1.))]
    for each in contenders:
        each._specs = [{'batch': 16}]
    found = contest.hold(contenders, WORKLOADS['small_conv'], contest.Effort(True),
                         lambda text: None)
    assert found['threads'] == {'one_device': 2, 'recipe': 1, 'slim': 0}
    assert {label: ratio['median'] for label, ratio in found['ratios'].items()} == {
        'one_device': 0.5, 'recipe': pytest.approx(0.5 / 0.7), 'slim': 2.}
    assert found['cpu_ratios']['slim'] == found['ratios']['slim']  # a pretender takes both cores
    assert found['failures'] == {} and found['batch'] == 16
    # The slower one of a peer has ended before the next peer is started.
    assert journal.index(('start', 'slim@0')) > max(
        place for place, entry in enumerate(journal) if entry[0] == 'recipe@0')


def test_without_a_probe_each_peer_is_there_once():
    labels = [each.label for each in contest.peers('tiny', 2, probe=False)]
    assert labels == ['towers', 'one_device@0', 'recipe@0', 'slim@0', 'mirrored_graph@0',
                      'mirrored_function@0', 'floor']
    labels = [each.label for each in contest.peers('tiny', 2, ('recipe', 'floor'))]
    assert labels == ['recipe@0', 'recipe@1', 'floor']


def test_a_known_thread_setting_is_not_looked_for_again():
    known = {'one_device': 1, 'recipe': 0}
    labels = [each.label for each in contest.peers('tiny', 2, ('towers', 'one_device', 'recipe'),
                                                   known=known)]
    assert labels == ['towers', 'one_device@1', 'recipe@0']
    labels = [each.label for each in contest.peers('tiny', 2, ('recipe', 'slim'), known=known)]
    assert labels == ['recipe@0', 'slim@0', 'slim@1']


def test_the_floor_of_a_deep_network_has_a_heat_of_its_own():
    assert contest.heats('dense', 4) == contest.heats('resnet50', 1) == [contest.PEERS]
    assert contest.heats('lstm', 8) == [contest.PEERS]
    assert contest.heats('resnet50', 2) == [contest.PEERS[:-1], ('towers', 'floor')]
    assert contest.PEERS[-1] == 'floor'


@pytest.mark.parametrize('name', ['dense', 'resnet50', 'inception_resnet'])
def test_many_towers_of_a_large_model_have_room_to_themselves(name):
    heats = contest.heats(name, 8)
    assert all(heat[0] == 'towers' and len(heat) <= 3 for heat in heats)
    others = [name for heat in heats for name in heat[1:]]
    assert others == list(contest.PEERS[1:])  # each of them once


def test_heats_are_joined_and_ratios_stay_those_of_their_heat():
    first = {'batch': 64, 'seconds': {'towers': [2.], 'recipe': [4.]}, 'ratios': {'recipe': 0.5},
             'failures': {'slim': 'died'}}
    second = {'batch': 64, 'seconds': {'towers': [3.], 'floor': [4.]}, 'ratios': {'floor': 0.75},
              'failures': {}}
    assert contest.joined([first]) == first
    assert contest.joined([first, second]) == {
        'batch': 64, 'seconds': {'towers': [2.], 'recipe': [4.], 'floor': [4.]},
        'ratios': {'recipe': 0.5, 'floor': 0.75}, 'failures': {'slim': 'died'}}


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_process_that_cannot_build_says_why():
    contender = turns.Contender('nobody', [dict(
        peer='nobody', workload='tiny', num_towers=1, batch=16)])
    contender.start()
    assert contender.failure == "KeyError: 'nobody'"


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_process_that_is_killed_says_so():
    contender = turns.Contender('one_device', [dict(
        peer='one_device', workload='tiny', num_towers=1, batch=16)])
    contender.start()
    try:
        contender._processes[0].kill()
        contender._processes[0].wait()  # so that the command finds nobody to read it
        with pytest.raises(turns.ContenderError, match='was killed: no memory left'):
            contender.run(1)
    finally:
        contender.close()


def test_no_process_without_memory(monkeypatch):
    monkeypatch.setattr(turns, 'free_memory', lambda: 1.5e9)
    contender = turns.Contender('towers', [{}])
    contender.start()
    assert contender.failure == 'left out: 1.5 GB of memory left'
