"""benchmarks/turns: spread, ratios, and the turns of contenders that need no process."""

from benchmarks import turns


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
