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
from towers.proof.written import Own


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
    if request.update_ops != 'first' or len(request.parts) == 1 and not served:
        return found
    machines = None
    if served:
        machines = 'servers'
    elif request.has_copies:
        machines = 'copies'
    analysis, size = recorded.proven.analysis, recorded.proven.static_size
    for op, names in writes:
        values = analysis.writes.get(op.name, [])
        every = [value for value in values if value.variable in names and _is_of_every_tower(
            value, op, analysis, size)]
        if every:
            _check_in_turn(op, every[0], machines)
            found.update(value.variable for value in every)
        if not values:
            _check_other(op, names, analysis)
    return found


def _is_of_every_tower(written, op, analysis, size):
    """Whether every tower has to write for the variable to get one device's value; else tower 0 may
    write for all. `SharedVariableError` where neither is so."""
    value = written.value
    if written.places is not None:
        return _is_of_rows(written, op, analysis)
    if value.kind is Kind.UNKNOWN:
        raise _refusal(written, op, "'%s' (%s) %s" % value.reason)
    if _does_not_depend(value):
        _check_count(written, op, size)
        return False
    if value.is_count or value.kind is Kind.SUM and not value.has_offset:
        if value.estimated:
            raise _refusal(written, op, _reason(value, analysis))
        if not written.sets:
            return True
    is_statistic = value.kind is Kind.MEAN or value.kind is Kind.INDEPENDENT
    is_average = is_statistic and written.own is Own.LINEAR
    is_set_to_mean = written.sets and value.kind is Kind.MEAN and written.own is Own.NOT
    if is_average or is_set_to_mean and not value.estimated:
        return False
    raise _refusal(written, op, _reason(value, analysis))


def _check_count(written, op, size):
    """Refuses to add a constant that may be the number of examples: `tf.shape(x)[0]` of a static
    batch is a constant, and does not show where it came from."""
    constant = None if written.sets else written.constant
    if constant is not None and constant == size and size > 1:
        raise SharedVariableError(
            'the model function adds %d to variable %s (operation %s), and a shard has %d '
            'examples, too: whether it counts the examples, as every tower would in turn, or adds '
            'a constant, is not known of a batch of static size. Pass a batch [None, ...].' % (
                constant, written.variable, op.name, size))


def _does_not_depend(value):
    """Whether a value is the same on every tower, and on one device."""
    if value.kind is Kind.SIZES:
        return not value.depends_on_size
    return value.kind is Kind.INDEPENDENT and not value.estimated


def _is_of_rows(written, op, analysis):
    """Whether rows are of examples, so that every tower has its own."""
    value, places = written.value, written.places
    for state in (value, places):
        if state.kind is Kind.UNKNOWN:
            raise _refusal(written, op, "'%s' (%s) %s" % state.reason)
        if state.estimated:
            raise _refusal(written, op, 'the rows are computed across the examples: ' + _reason(
                state, analysis))
    if _does_not_depend(value) and _does_not_depend(places):
        return False
    if places.is_by_example and (value.is_by_example or _does_not_depend(value)):
        return True
    raise _refusal(written, op, 'the rows are %s, at places that are %s' % (
        value.kind.value, places.kind.value))


def _reason(value, analysis):
    """Why a value is none that tower 0 or every tower can write, in words."""
    names = analysis.in_order(value.estimated)
    if names:
        return "'%s' (%s) %s" % analysis.reasons[names[0]]
    return 'the value is %s' % value.kind.value


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
    is_rows, reason = written.places is not None, None
    if machines == 'servers' or machines and is_rows:  # a count is a worker's own
        reason = 'other machines would not get the rows: train on one machine'
    elif op.name != written.operation or compat.in_control_flow(op):
        reason = 'the operation is in a branch, a loop or a function: write outside of it'
    if reason is not None:
        raise SharedVariableError(
            'the model function writes variable %s by its examples (operation %s), which every '
            'tower does in its turn, and %s.' % (written.variable, op.name, reason))


def _check_other(op, names, analysis):
    """Refuses a write in a way of its own, by any value that depends on the examples."""
    for tensor in op.inputs:
        state = analysis.of(tensor)
        if not _does_not_depend(state):
            why = "'%s' (%s) %s" % state.reason if state.reason else _reason(state, analysis)
            raise SharedVariableError(
                'the model function writes variable %s (operation %s, %s) by its examples (%s): '
                'assign, add or scatter the values, so that it is known which tower is to write.'
                % (names[0], op.name, op.type, why))
