"""The command line of train.py: parses flags, shows the help, says errors in the words of flags."""

import os
import re
import sys
import textwrap

from absl import flags

from trainer.contradictions import contradiction
from trainer.flags import FLAGS, GROUPS, PATHS


def help_text(summary):
    """The text of --help: a summary, and all flags in groups, one or two lines each."""
    lines = [summary, '']
    for group, names in GROUPS.items():
        lines.append('%s:' % group)
        for name in names:
            default = FLAGS[name].default
            text = '%s (%s)' % (FLAGS[name].help, "''" if default == '' else default)
            lines += textwrap.wrap(text, 98, initial_indent='  --%-20s ' % name,
                                   subsequent_indent=' ' * 25)
    return '\n'.join(lines)


def parse_flags(argv, summary=''):
    """Parses flags as absl does; shows the help in groups, and errors in one line (status 2).

    Args:
      argv: list of strings, the program first.
      summary: first line of the help.

    Returns:
      The arguments that are no flags: the program alone.

    Raises:
      SystemExit: after the help, or an error.
    """
    if {'--help', '--helpshort', '-h', '-help', '-helpshort'} & set(argv[1:]):
        print(help_text(summary))
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        text = re.sub(r"invalid literal for int\(\) with base 10: .*", 'expected a whole number',
                      str(error))
        text = re.sub('could not convert string to float: .*', 'expected a number', text)
        refuse(re.sub(r"\('Non-boolean argument .*", 'expected true or false', text))
    if len(rest) > 1:
        refuse('%r is no flag: flags begin with --' % rest[1])
    for name in PATHS:  # as of a shell, which leaves --train_dir=~/run as it is
        FLAGS[name].value = os.path.expanduser(re.sub('^file://(?=/)', '', FLAGS[name].value))
    wrong = contradiction({name for name in FLAGS if FLAGS[name].present})
    if wrong:
        refuse(wrong)
    return rest


# ---- Errors in the words of flags ----------------------------------------------------------------

# Advice in errors of `towers` about arguments of calls (a pattern), and the same about flags.
_PHRASES = [
    (r',? or pass resolve_devices\(…, check=False\) to build the graph for [^.]*', ', or see its plan with '
     '--plan_only'),
    (r'; or pass resolve_devices\(…, check=False\) and a config with [^.]*', ''),
    (r',? or pass resolve_devices\(…, allow_repeated=True\)[^.]*', ''),
    (r' \(recover=True\)| \(towers\.init_from\)', ''),
    (r" If only a scope in the names differs, pass a dict from names there to variables\.", ''),
    (r'create_aux_logits=False', '--aux_loss_weight=0'),
    (r"\brecompute=\['(.*?)'\]",
     lambda found: '--recompute=' + found.group(1).replace("', '", ',')),
    (r'\bgive a rank, from 0\b', 'give --task_index, from 0'),
    (r"\bname one under 'ps'", "name one by --ps_hosts, or under 'ps' of TF_CONFIG"),
    (r"\bpass workers=\['host:port', …\]", 'give --worker_hosts=host:port,…'),
    (r'\bworkers=\(\)', '--worker_hosts'),
    (r'\b(takes no|needs a) data_dir', r'\1 --data_dir'),
    (r"stop_at=\('accuracy', ([\d.]+)\)", r'--stop_at_accuracy=\1'),
    (r"\bVariablePlacement\('([^']*)'\)", r'--variable_device=\1')]
_ARGUMENT = re.compile(r"(?<![\w\-./])([a-z]\w*)=('[^']*'|[\w.+\-]*[\w+](?![\w/]))")


def in_flags(text):
    """The text of an error of `towers`, with flags in place of the arguments they stand for."""
    for pattern, instead in _PHRASES:
        text = re.sub(pattern, instead, text)

    def flag(found):
        name, value = found.groups()
        if name == 'devices' and not FLAGS['devices'].value:
            name = 'num_towers'
        name = 'cluster' if name == 'kind' else name
        if name not in sum(GROUPS.values(), []):
            return found.group(0)
        return '--%s=%s' % (name, value.strip("'"))
    return _ARGUMENT.sub(flag, text)


def refuse(reason):
    """Prints one line that says why the program does not start, and exits with status 2."""
    say(' '.join(str(reason).split()))
    sys.exit(2)


def say(reason):
    """Prints an error, or its text, as one line on standard error."""
    sys.stderr.write('train.py: %s\n' % ' '.join(in_flags(str(reason)).splitlines()))
