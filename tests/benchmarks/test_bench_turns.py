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


def test_ratios_are_taken_round_by_round():
    # The second round was slow for both: that must not show.
    assert turns.ratios([1., 10., 1.2], [2., 20., 2.]) == {
        'median': 0.5, 'least': 0.5, 'most': 0.6}


def test_turns_alternate_and_take_equally_long():
    journal = []
    fast, slow = Pretender('fast', 0.01, journal), Pretender('slow', 0.1, journal)
    assert turns.take_turns([fast, slow], 2, 1.) == {'fast': 100, 'slow': 10}
    assert journal[4:] == [('fast', 100), ('slow', 10), ('slow', 10), ('fast', 100)]
    assert fast.seconds == [0.01, 0.01] and slow.cpu_seconds == [0.2, 0.2]


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
