"""Cuts a line of pieces into stages of which the costliest costs least, where the least crosses."""

import collections

from towers.errors import ModelFunctionError

_SLACK = 1.07  # what the costliest stage may cost over the best cut, so that less crosses
_PRECISION = 1e-3

Piece = collections.namedtuple('Piece', 'held kept gradients transient seconds crossing')
"""Neighbouring operations that stay in one stage.

Fields:
  held: bytes that the stage holds all the time for it: variables and their slots.
  kept: bytes that its forward pass keeps for its backward pass, of one micro-batch.
  gradients: bytes of the gradients of its variables.
  transient: bytes that are there only while it runs.
  seconds: that it takes, forward, backward and update.
  crossing: bytes of the tensors made up to its end that later pieces take.
"""

BALANCES = ('memory', 'time', 'both')


class StageCost:
    """What neighbouring pieces cost as one stage.

    When the backward pass is at piece j, the activations up to j are still kept, and the gradients
    from j on are there. So the memory of a stage is

        sum held + max_j (copies * sum_{i <= j} kept_i + transient_j + sum_{i >= j} gradients_i)

    Attributes:
      held: bytes.
      seconds: seconds.
    """
    __slots__ = ('held', 'seconds', '_copies', '_kept', '_gradients', '_worst')

    def __init__(self, copies, pieces=()):
        """
        Args:
          copies: micro-batches whose activations the stage keeps at the same time.
          pieces: list of `Piece`.
        """
        self._copies = copies
        self.held = self.seconds = self._kept = self._gradients = self._worst = 0
        for piece in pieces:
            self.add_last(piece)

    @property
    def memory(self):
        """Bytes at its worst moment."""
        return self.held + self._worst

    def add_last(self, piece):
        """Makes the stage larger at its end."""
        self.held += piece.held
        self.seconds += piece.seconds
        self._gradients += piece.gradients
        self._kept += self._copies * piece.kept
        self._worst = piece.gradients + max(self._worst, self._kept + piece.transient)

    def add_first(self, piece):
        """Makes the stage larger at its beginning."""
        self.held += piece.held
        self.seconds += piece.seconds
        self._gradients += piece.gradients
        self._kept += self._copies * piece.kept
        self._worst = self._copies * piece.kept + max(
            self._worst, piece.transient + self._gradients)


def cut_evenly(pieces, copies, balance):
    """Where to cut: the costliest stage costs at most 7 % more than with the best cut.

    Among such cuts those are taken that the fewest bytes cross; of these, those between layers.

    Args:
      pieces: list of `Piece`, at least as many as stages.
      copies: of each stage, as for `StageCost`.
      balance: one of `BALANCES`: what a stage costs: its memory; its time; or both, each over what
        it costs at the least to cut by it alone, the greater of these.

    Returns:
      List of the numbers of the last piece of each stage but the last one.
    """
    measures = [each for each in BALANCES[:2] if balance in (each, 'both')]
    units = [_least(pieces, copies, _MEASURES[each]) or 1. for each in measures]

    def cost(stage):
        return max(_MEASURES[each](stage) / unit for each, unit in zip(measures, units))
    high = 1. if len(measures) == 1 else _least(pieces, copies, cost)
    limit = high * _SLACK
    earliest, cuts = _earliest(pieces, copies, cost, limit), []
    for number in range(len(copies) - 1):
        start = cuts[-1] + 1 if cuts else 0
        # Sums of seconds from the other end differ in the last bit.
        last = _latest(pieces[start:], copies[number:], cost, limit * (1 + 1e-9))[0] + start
        first = max(earliest[number], start)
        middle = (first + last) / 2.
        cuts.append(min(range(first, last + 1), key=lambda place: (
            pieces[place].crossing, not _between_layers(*pieces[place:place + 2]),
            abs(place - middle))))
    return cuts


_MEASURES = {'memory': lambda stage: stage.memory, 'time': lambda stage: stage.seconds}


def _least(pieces, copies, cost):
    """What the costliest stage costs with the best cut."""
    low, high = 0., float(cost(StageCost(max(copies), pieces)))
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _latest(pieces, copies, cost, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _between_layers(before, after):
    """Whether an activation is kept, and variables come next: TensorFlow fuses what lies within."""
    return bool(before.kept and after.held)


def cut_between(pieces, stage_of):
    """Where to cut so that pieces stay in the stages in which they have to be.

    Args:
      pieces: list of `Piece`.
      stage_of: for each piece, the set of the numbers of such stages.

    Returns:
      As `cut_evenly`; None where there is no such cut, or a stage that no piece has to be in.
    """
    count = max((max(each) for each in stage_of if each), default=0) + 1
    cuts = []
    for number in range(1, count):
        before = [place for place, each in enumerate(stage_of) if any(n < number for n in each)]
        after = [place for place, each in enumerate(stage_of) if any(n >= number for n in each)]
        first = max(before[-1] if before else -1, cuts[-1] + 1 if cuts else 0)
        if not before or first >= after[0]:
            return None
        cuts.append(min(range(first, after[0]), key=lambda place: pieces[place].crossing))
    return cuts


def _latest(pieces, copies, cost, limit):
    """The latest cuts at which no stage costs more than a limit; None where there are none."""
    cuts, place = [], 0
    for number, each in enumerate(copies):
        stage, end = StageCost(each), len(pieces) - (len(copies) - 1 - number)
        begin = place
        while place < end:
            stage.add_last(pieces[place])
            if cost(stage) > limit:
                break
            place += 1
        if place == begin:
            return None
        cuts.append(place - 1)
    return cuts[:-1] if place == len(pieces) else None


def _earliest(pieces, copies, cost, limit):
    """The earliest cuts at which no stage costs more than a limit that `_latest` can hold."""
    cuts, place = [], len(pieces) - 1
    for number in range(len(copies) - 1, 0, -1):
        stage = StageCost(copies[number])
        stage.add_first(pieces[place])
        place -= 1
        while place >= number:
            stage.add_first(pieces[place])
            if cost(stage) > limit:
                break
            place -= 1
        cuts.append(place)
    return cuts[::-1]


def check_enough(count, stages):
    """Raises `ModelFunctionError` where there are fewer pieces than stages."""
    if count < stages:
        raise ModelFunctionError(
            "stages='auto', and there are %d devices a tower for %d operations of the model that "
            'may be put anywhere: name fewer devices, or leave out towers.stage and tf.device in '
            'the model function (or stages=).' % (stages, count))
