"""The roles of shared variables that a step writes, by what is proven of the written values.

    a value that does not depend on the examples        tower 0 writes
    a mean over the examples, set                       tower 0 writes
    a moving average of a statistic of the examples     tower 0 writes, as of batch norm
    a sum, or a count of examples, added                every tower adds, in turn
    rows, each of one example, by places of examples    every tower writes, in turn

A moving average depends on the variable's own value before, linearly. Everything else can be no
tower's: of a part of the batch it would have another value than of the whole. It is refused.
"""

from towers import compat
from towers.errors import SharedVariableError
from towers.proof.states import Kind
from towers.proof.written import Dependence


def written_by_every_tower(recorded, writes, request):
    """Finds the variables that every tower writes, in turn.

    Args:
      recorded: `Recorded`, the call of the model function.
      writes: list of `Write`s of shared variables that a step of tower 0 runs.
      request: `Request` of the build.

    Returns:
      The names of the variables: a set. All others are written by tower 0 alone.

    Raises:
      SharedVariableError: a value that neither tower 0 nor every tower can write.
    """
    served, found = request.served_rank is not None, set()
    if request.training.update_ops != 'first' or len(request.split.parts) == 1 and not served:
        return found
    machines = None
    if served:
        machines = 'servers'
    elif request.has_copies:
        machines = 'copies'
    judge = _Judge(recorded)
    for op, names in writes:
        values = judge.analysis.writes.get(op.name, [])
        every = [value for value in values
                 if value.variable in names and judge.is_of_every_tower(value, op)]
        if every:
            _check_in_turn(op, every[0], machines)
            found.update(value.variable for value in every)
        if not values:
            judge.check_other(op, names)
    return found


class _Judge:
    """Says of written values whether every tower writes them, by what is proven of a call."""

    def __init__(self, recorded):
        self.analysis = recorded.proven.analysis
        self._size, self._from_shard = recorded.proven.static_size, recorded.from_shard
        self._batch_norms = recorded.proven.batch_norms.statistics()

    def is_of_every_tower(self, written, op):
        """Whether every tower has to write for the variable to get one device's value; else tower 0
        may write for all.

        Args:
          written: `Written`, what is written.
          op: the operation of the program that writes it.

        Raises:
          SharedVariableError: neither is so.
        """
        if op.name not in self._from_shard:
            self._check_count(written, op)
            if not written.value.is_count:
                return False
        if written.indices is not None:
            return self._is_of_rows(written, op)
        value = written.value
        if value.kind is Kind.UNKNOWN:
            raise _refusal(written, op, _in_words(value.reason))
        if _does_not_depend(value):
            self._check_count(written, op)
            return False
        is_sum = value.is_count or value.kind is Kind.SUM and not value.has_offset
        if is_sum and not written.sets and not self._marks(value):
            return True
        is_statistic = value.kind is Kind.MEAN or value.kind is Kind.INDEPENDENT
        is_added_average = not written.sets and written.dependence is Dependence.RUNNING_SUM
        is_average = written.dependence is Dependence.LINEAR or is_added_average
        if is_statistic and is_average:
            return False
        is_mean = value.kind is Kind.MEAN and written.dependence is Dependence.NONE
        if written.sets and is_mean and not self._marks(value):
            return False
        raise _refusal(written, op, self._reason(value))

    def _is_of_rows(self, written, op):
        """Whether rows are of examples, so that every tower has its own."""
        value, places = written.value, written.indices
        for state in (value, places):
            if state.kind is Kind.UNKNOWN:
                raise _refusal(written, op, _in_words(state.reason))
            if self._marks(state):
                raise _refusal(written, op, 'the rows are computed across the examples: '
                               + self._reason(state))
        if _does_not_depend(value) and _does_not_depend(places):
            return False
        if places.is_by_example and (value.is_by_example or _does_not_depend(value)):
            return True
        raise _refusal(written, op, 'the rows are %s, at places that are %s' % (
            value.kind.value, places.kind.value))

    def _marks(self, state):
        """The statistics of the shard that a value depends on, but for those of batch norms, by
        which the loss differs from one device's, too."""
        return state.shard_statistics - self._batch_norms

    def _reason(self, value):
        """Why a value is none that tower 0 or every tower can write, in words."""
        names = self.analysis.in_order(self._marks(value))
        if names:
            return _in_words(self.analysis.reasons[names[0]])
        return 'the value is %s' % value.kind.value

    def _check_count(self, written, op):
        """Refuses to add a constant that may be the number of examples: `tf.shape(x)[0]` of a
        static batch is a constant, and does not show where it came from."""
        constant = None if written.sets or written.indices is not None else written.constant
        if constant is not None and constant == self._size and self._size > 1:
            raise SharedVariableError(
                'the model function adds %d to variable %s (operation %s), and a shard has %d '
                'examples, too: whether it counts the examples, as every tower would in turn, or '
                'adds a constant, is not known of a batch of static size. Pass a batch '
                '[None, ...].' % (constant, written.variable, op.name, self._size))

    def check_other(self, op, names):
        """Refuses a write in a way of its own, by any value that depends on the examples."""
        if op.name not in self._from_shard:
            return
        if self._size and op.name not in self.analysis.analysed:
            raise SharedVariableError(
                'the model function writes variable %s (operation %s) by its examples, and the '
                'graph has the size of a shard, %d, in it, so that it is not known which tower is '
                'to write: pass a batch [None, ...], and take sizes from tf.shape.' % (
                    names[0], op.name, self._size))
        for tensor in op.inputs:
            state = self.analysis.state(tensor)
            if not _does_not_depend(state):
                why = _in_words(state.reason) if state.reason else self._reason(state)
                raise SharedVariableError(
                    'the model function writes variable %s (operation %s, %s) by its examples '
                    '(%s): assign, add or scatter the values, so that it is known which tower is '
                    'to write.' % (names[0], op.name, op.type, why))


def _does_not_depend(value):
    """Whether a value is the same on every tower, and on one device."""
    if value.kind is Kind.SIZES:
        return not value.depends_on_size
    return value.kind is Kind.INDEPENDENT and not value.shard_statistics


def _in_words(reason):
    return "'%s' (%s) %s" % reason


def _refusal(written, op, why):
    return SharedVariableError(
        'the model function writes variable %s (operation %s) by its examples, and no moving '
        'average of them (%s): of a part of the batch it would have another value than of the '
        'whole. Take the value over all towers (towers.batch_sum, towers.batch_mean), or compute '
        'it from what does not depend on the examples.' % (written.variable, op.name, why))


def _check_in_turn(op, written, machines):
    """Refuses what every tower would write in turn where it cannot.

    Args:
      op: the operation of the program that writes.
      written: its `Written`.
      machines: the machines that make the same step: `'servers'` have the variables, `'copies'`
        have them on each worker; or None.
    """
    is_rows, reason = written.indices is not None, None
    if machines == 'servers' or machines and is_rows:  # a count is a worker's own
        reason = 'other machines would not get the rows: train on one machine'
    elif op.name != written.operation or compat.in_control_flow(op):
        reason = 'the operation is in a branch, a loop or a function: write outside of it'
    if reason is not None:
        raise SharedVariableError(
            'the model function writes variable %s by its examples (operation %s), which every '
            'tower does in its turn, and %s.' % (written.variable, op.name, reason))
