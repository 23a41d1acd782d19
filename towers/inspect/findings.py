"""`Finding`, a line of an audit; texts in these lines; and the findings about variables.

Its test is tests/inspect/test_audit.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import counted
from towers.graph.graph_walk import variables_by_name
from towers.placement.devices import short_name
from towers.reduce.replicas import Replicas
from towers.variables.slots import owner_by_name


class Finding(typing.NamedTuple):
    """One line of an audit.

    Attributes:
      is_broken: whether a promise of the plan does not hold; else the line tells a
        fact that is no fault.
      line: what was found.
    """

    is_broken: bool
    line: str


Findings = typing.Iterator[Finding]

DeviceOf = typing.Callable[[tf.Variable], str]
"""A function from a variable to its canonical device, `''` for none."""


def broken(line: str) -> Finding:
    """The finding that a promise of the plan does not hold."""
    return Finding(is_broken=True, line=line)


def note(line: str) -> Finding:
    """The finding of a fact that is no fault."""
    return Finding(is_broken=False, line=line)


def counted_operations(operations: typing.Sized) -> str:
    """How many operations there are: `'1 operation'`."""
    return counted(len(operations), 'operation')


def device_name(device: str) -> str:
    """The short name of a device; `'no device'` for `''`."""
    return short_name(device) if device else 'no device'


def first_few(texts: typing.Sequence[str], limit: int = 3) -> str:
    """The first `limit` of some texts, and how many more there are."""
    text = ', '.join(texts[:limit])
    if len(texts) > limit:
        text += ', ... (%d more)' % (len(texts) - limit)
    return text


def bytes_text(count: float) -> str:
    """A number of bytes as text: `'1.2 MB'`."""
    for unit, size in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if count >= size:
            return '%.1f %s' % (count / size, unit)
    return '%d bytes' % count


# ---- variables -----------------------------------------------------------------------------------

def findings_of_variables(built: BuiltTowers, device_of: DeviceOf) -> Findings:
    """Yields the variables, replicas and slots that are not on the devices of the plan."""
    allowed = built.placement.devices()
    without_device = []  # names of variables that the program made
    for variable in built.variables:
        name = variable.op.name
        device = device_of(variable)
        if device in allowed:
            continue
        was_made_by_build = name in built.made  # then the build has placed it
        if was_made_by_build:
            yield broken('variable %s is on %s, not on %s' % (
                name, device_name(device), ' or '.join(map(short_name, allowed))))
        elif device:
            yield note('variable %s, made before the towers, is on %s' % (name, short_name(device)))
        else:
            without_device.append(name)
    if without_device:
        yield note('%s, made before the towers, on no device (the runtime chooses): %s' % (
            counted(len(without_device), 'variable'),
            first_few(without_device)))
    yield from _findings_of_slots(built.slots, built.variables, device_of, 'its variable')
    if built.replicas is not None:
        yield from _findings_of_replicas(built, built.replicas, device_of)
        yield from _findings_of_slots(built.replicas.slots, built.replicas.variables, device_of,
                                      'the replica of its variable')


def _findings_of_replicas(built: BuiltTowers, replicas: Replicas, device_of: DeviceOf) -> Findings:
    """Yields the replicas that are not on their tower's device."""
    for variable in built.variables:
        for tower in built.towers[1:]:
            replica = replicas.replica_of(variable, tower.index)
            has_replica = replica is not variable
            if has_replica and device_of(replica) != tower.device:
                yield broken("tower %d's replica of %s is on %s, not on %s" % (
                    tower.index, variable.op.name, device_name(device_of(replica)),
                    short_name(tower.device)))


def _findings_of_slots(slots: typing.Iterable[tf.Variable], owners: typing.Iterable[tf.Variable],
                       device_of: DeviceOf, owner_text: str) -> Findings:
    """Yields the slots that are not on the device of the variable that they belong to.

    Args:
      slots: variables that an optimizer has made.
      owners: the variables that the slots belong to.
      device_of: gives the device of a variable.
      owner_text: what the finding calls an owner.
    """
    owners_by_name = variables_by_name(owners)
    for slot in slots:
        owner = owner_by_name(slot.op.name, owners_by_name)
        if owner is None:
            continue  # it belongs to all variables, as Adam's beta1_power
        if not device_of(owner):
            continue  # the runtime chooses the device; the metadata of a step tells which
        if device_of(slot) != device_of(owner):
            yield broken('slot %s is on %s, %s on %s' % (
                slot.op.name, device_name(device_of(slot)), owner_text,
                short_name(device_of(owner))))
