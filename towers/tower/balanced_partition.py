"""Cuts a line of pieces into stages of which the fullest holds least, where the least crosses."""

import collections

from towers.errors import ModelFunctionError

_SLACK = 1.07  # what the fullest stage may hold over the best cut, so that less crosses
_PRECISION = 1e-3

Piece = collections.namedtuple('Piece', 'held kept gradients transient crossing')
"""Neighbouring operations that stay in one stage; all in bytes.

Fields:
  held: what the stage holds all the time for it: variables and their slots.
  kept: what its forward pass keeps for its backward pass, of one micro-batch.
  gradients: of its variables.
  transient: what is there only while it runs.
  crossing: the tensors made up to its end that later pieces take.
"""


class StageCost:
    """What neighbouring pieces cost as one stage.

    When the backward pass is at piece j, the activations up to j are still kept, and the gradients
    from j on are there. So the memory of a stage is

        sum held + max_j (copies * sum_{i <= j} kept_i + transient_j + sum_{i >= j} gradients_i)
    """
    __slots__ = ('_held', '_copies', '_kept', '_gradients', '_worst')

    def __init__(self, copies, pieces=()):
        """
        Args:
          copies: micro-batches whose activations the stage keeps at the same time.
          pieces: list of `Piece`.
        """
        self._copies = copies
        self._held = self._kept = self._gradients = self._worst = 0
        for piece in pieces:
            self.add_last(piece)

    @property
    def memory(self):
        """Bytes at its worst moment."""
        return self._held + self._worst

    def add_last(self, piece):
        """Makes the stage larger at its end."""
        self._held += piece.held
        self._gradients += piece.gradients
        self._kept += self._copies * piece.kept
        self._worst = piece.gradients + max(self._worst, self._kept + piece.transient)

    def add_first(self, piece):
        """Makes the stage larger at its beginning."""
        self._held += piece.held
        self._gradients += piece.gradients
        self._kept += self._copies * piece.kept
        self._worst = self._copies * piece.kept + max(
            self._worst, piece.transient + self._gradients)


def cut_evenly(pieces, copies):
    """Where to cut: the fullest stage holds at most 7 % more than with the best cut.

    Among such cuts those are taken that the fewest bytes cross; of these, those between layers.

    Args:
      pieces: list of `Piece`, at least as many as stages.
      copies: of each stage, as for `StageCost`.

    Returns:
      List with the place of the last piece of each stage but the last one.
    """
    limit = _least(pieces, copies) * _SLACK
    earliest, cuts = _earliest(pieces, copies, limit), []
    for number in range(len(copies) - 1):
        start = cuts[-1] + 1 if cuts else 0
        last = _latest(pieces[start:], copies[number:], limit)[0] + start
        first = max(earliest[number], start)
        middle = (first + last) / 2.
        cuts.append(min(range(first, last + 1), key=lambda place: (
            pieces[place].crossing, not _between_layers(*pieces[place:place + 2]),
            abs(place - middle))))
    return cuts


def _least(pieces, copies):
    """What the fullest stage holds with the best cut."""
    low, high = 0., float(StageCost(max(copies), pieces).memory)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _latest(pieces, copies, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _between_layers(before, after):
    """Whether an activation is kept, and variables come next: TensorFlow fuses what lies within."""
    return bool(before.kept and after.held)


def _latest(pieces, copies, limit):
    """The latest cuts at which no stage holds more than a limit; None where there are none."""
    cuts, place = [], 0
    for number, each in enumerate(copies):
        stage, end = StageCost(each), len(pieces) - (len(copies) - 1 - number)
        begin = place
        while place < end:
            stage.add_last(pieces[place])
            if stage.memory > limit:
                break
            place += 1
        if place == begin:
            return None
        cuts.append(place - 1)
    return cuts[:-1] if place == len(pieces) else None


def _earliest(pieces, copies, limit):
    """The earliest cuts at which no stage holds more than a limit that `_latest` can hold."""
    cuts, place = [], len(pieces) - 1
    for number in range(len(copies) - 1, 0, -1):
        stage = StageCost(copies[number])
        stage.add_first(pieces[place])
        place -= 1
        while place >= number:
            stage.add_first(pieces[place])
            if stage.memory > limit:
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
