"""What `build_towers(stages=…)` takes besides `'auto'`: what to balance, and measured times."""

import collections
import sys
import typing

from towers.arguments import check_choice, check_instance, check_number
from towers.errors import InvalidArgumentError
from towers.tower.balanced_partition import BALANCES


class OperationTimes(collections.namedtuple('OperationTimes', 'operations variables')):
    """How long a step is busy with each operation of a model, as a trace of it says.

    Attributes:
      operations: dict from the names of the model's operations, without the tower's scope, to
        seconds: their own, and those of the operations of the backward pass that belong to them.
      variables: dict from the names of variables to the seconds of their updates.
    """
    __slots__ = ()

    @property
    def seconds(self):
        """All together."""
        return sum(self.operations.values()) + sum(self.variables.values())


class AutoStages(collections.namedtuple('AutoStages', 'balance times')):
    """How `build_towers` cuts a model into stages by itself.

    >>> times = towers.OperationTimes({'conv1/Conv2D': 0.02, 'logits/MatMul': 0.01}, {})
    >>> built = build(devices='/gpu:0+/gpu:1', stages=towers.AutoStages('time', times))

    Attributes:
      balance: what is made even among the stages: `'memory'`, as `stages='auto'` does; `'time'`,
        which a pipeline wants; or `'both'`: the fullest stage and the slowest one are as near as
        possible to what they are with the others.
      times: `OperationTimes` of the same model; None for `'memory'`.
    """
    __slots__ = ()

    def __new__(cls, balance: str = 'memory',
                times: typing.Optional[OperationTimes] = None):
        check_choice('balance', balance, BALANCES)
        if times is not None:
            check_instance('times', times, OperationTimes, 'OperationTimes')
            check_seconds(times)
        elif balance != 'memory':
            raise InvalidArgumentError(
                'AutoStages(%r) needs times=, the OperationTimes of this model.' % (balance,))
        return super(AutoStages, cls).__new__(cls, balance, times)


def check_seconds(times):
    """Raises `InvalidArgumentError` unless `OperationTimes` hold dicts from names to seconds."""
    for field, seconds in times._asdict().items():
        check_instance('times.' + field, seconds, dict, 'a dict from names to seconds')
        for name, each in seconds.items():
            check_instance('a name in times.' + field, name, str, 'the name of an operation')
            check_number('times.%s[%r]' % (field, name), each, least=0, most=sys.float_info.max,
                         expected='seconds, at least 0')


def checked_stages(stages):
    """`AutoStages`, or None, of the argument `stages` of `build_towers`.

    Raises:
      InvalidArgumentError: something else.
    """
    if stages is None or isinstance(stages, AutoStages):
        return stages
    if isinstance(stages, str) and stages == 'auto':
        return AutoStages()
    raise InvalidArgumentError(
        "stages=%.80r: expected 'auto', for as many as a tower has devices, towers.AutoStages(…), "
        'which says what to balance, or None. Where they are cut by hand, the model function says, '
        'by towers.stage(number).' % (stages,))
