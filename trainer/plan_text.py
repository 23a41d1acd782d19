"""The short form of plan and audit that train.py shows before step 1; --plan shows all of both.

It has what a user has chosen, and everything that asks for attention: a line of the plan that is
not among `_ROUTINE` is shown, too.
"""

import textwrap

import towers
from towers.placement.devices import short_name

_WIDTH = 100  # columns of a screen
_MOST_DEVICES = 4  # that the first line names

# Lines of a plan that say how, where nothing unusual was asked for.
_ROUTINE = frozenset([
    'towers', 'variables', 'variables on', 'session', 'session_config', 'optimizer',
    'regularization', 'batch norm', 'updated by', 'of each tower'])


def short_plan(plan: towers.Plan, audit: towers.Audit) -> str:
    """The short form of the plan and the audit of towers.

    Args:
      plan: of the towers.
      audit: of the same towers, without a broken promise.

    Returns:
      Lines: the batch and the devices, the variables, what is not routine, and the audit's verdict
      with what is sent between devices.
    """
    lines = ['%s, on %s' % (str(plan).partition('\n')[0], _devices(plan)),
             _line('variables', '%s, on %s' % (plan.line('variables'), plan.line('variables on')))]
    for label, text in plan.lines:
        if label not in _ROUTINE:
            lines.append(_line(label, text))
    lines.append('%s; %s' % (str(audit).partition('\n')[0], _sent(audit)))
    lines += ['  note    ' + note for note in audit.notes if not _is_of_variables(note)]
    lines.append('--plan shows all of the plan and of the audit')
    return '\n'.join(lines)


def _devices(plan: towers.Plan):
    """The devices of all towers; of many, the first and the last."""
    names = [short_name(tower.device) for tower in plan.towers]
    if len(names) > _MOST_DEVICES:
        return '%s to %s' % (names[0], names[-1])
    return ', '.join(names)


def _line(label: str, text: str):
    """A line of the plan, as the whole plan has it."""
    wrapped = textwrap.wrap(text, _WIDTH - 19)
    indented = ('\n' + 19 * ' ').join(wrapped)
    return '  %-15s  %s' % (label, indented)


def _sent(audit: towers.Audit):
    """What is sent between devices in a step, in words."""
    if not audit.transfers:
        return 'nothing is sent between devices'
    sent = sum(transfers.bytes for transfers in audit.transfers)
    return '%.4g MB a step are sent between devices' % (sent / 1e6)


def _is_of_variables(note: str):
    """Whether a note says that a tower reaches variables where they are, as every tower does."""
    return 'reads and writes variables where they are' in note


def whole_plan(plan: towers.Plan, audit: towers.Audit, session_config: str) -> str:
    """All of the plan and the audit, and what `Plan.explain` says.

    Args:
      plan: of the towers.
      audit: of the same towers.
      session_config: what the session is configured by, in place of the plan's own text, which
        says what it would be without flags.
    """
    whole = plan.with_line('session_config', session_config)
    return '%s\n%s\n%s' % (whole, plan.explain(), audit)
