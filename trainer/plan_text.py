"""The short form of plan and audit that train.py shows before step 1; --plan shows all of both.

The short form has what a user has chosen, and everything that needs attention: all lines of the
plan whose labels are not in `_ROUTINE`.
"""

import textwrap

import towers
from towers.placement.devices import short_name

_WIDTH = 100  # columns of a screen
_MOST_DEVICES = 4  # with more devices the first line names only the first and the last

# The labels of lines that are the same in most runs, or say how the towers were built.
_ROUTINE = frozenset([
    'towers', 'variables', 'variables on', 'session', 'session_config', 'optimizer',
    'regularization', 'batch norm', 'updated by', 'of each tower'])


def short_plan(plan: towers.Plan, audit: towers.Audit) -> str:
    """The short form of the plan and the audit of towers.

    Args:
      plan: the plan of the towers.
      audit: the audit of the same towers, without a broken promise.

    Returns:
      Lines about the batch and the devices, about the variables, all lines of the plan that are not
      routine, and the audit's verdict, with the bytes that are sent between devices.
    """
    batch, _, _ = str(plan).partition('\n')  # the first line, '2 towers, batch 100 = 2 x 50'
    verdict, _, _ = str(audit).partition('\n')  # the first line, 'audit: every promise kept'
    variables = '%s, on %s' % (plan.line('variables'), plan.line('variables on'))
    lines = ['%s, on %s' % (batch, _devices(plan)), _line('variables', variables)]
    for label, text in plan.lines:
        if label not in _ROUTINE:
            lines.append(_line(label, text))
    lines.append('%s; %s' % (verdict, _sent(audit)))
    lines += ['  note    ' + note for note in audit.notes if not _is_of_variables(note)]
    lines.append('--plan shows all of the plan and of the audit')
    return '\n'.join(lines)


def _devices(plan: towers.Plan) -> str:
    """The text about the devices of all towers; of many, the first and the last."""
    names = [short_name(tower.device) for tower in plan.towers]
    if len(names) > _MOST_DEVICES:
        return '%s to %s' % (names[0], names[-1])
    return ', '.join(names)


def _line(label: str, text: str) -> str:
    """A line of the plan as the whole plan has it: a label, and the text in a column beside it."""
    indent = 2 + 15 + 2  # before the label, of the label's column, after it
    wrapped = textwrap.wrap(text, _WIDTH - indent)
    text_in_column = ('\n' + indent * ' ').join(wrapped)
    return '  %-15s  %s' % (label, text_in_column)


def _sent(audit: towers.Audit) -> str:
    """The text about how much is sent between devices in a step."""
    if not audit.transfers:
        return 'nothing is sent between devices'
    sent = sum(transfers.bytes for transfers in audit.transfers)
    return '%.4g MB a step are sent between devices' % (sent / 1e6)


def _is_of_variables(note: str) -> bool:
    """Whether a note says that a tower uses variables on their device, as every tower does."""
    return 'reads and writes variables where they are' in note


def whole_plan(plan: towers.Plan, audit: towers.Audit, session_config: str) -> str:
    """The text of the whole plan, then what `Plan.explain` prints, then the whole audit.

    Args:
      plan: the plan of the towers.
      audit: the audit of the same towers.
      session_config: the text about the session's config. It replaces the text of the plan, which
        describes the config without flags.
    """
    whole = plan.with_line('session_config', session_config)
    return '%s\n%s\n%s' % (whole, plan.explain(), audit)
