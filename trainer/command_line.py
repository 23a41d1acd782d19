"""The command line of train.py: parses flags, shows the help, says errors in the words of flags."""

import difflib
import json
import os
import re
import sys
import textwrap

from absl import flags

from towers.errors import BadFileError, shown
from towers.safe_files import SCALAR, read_json
from trainer.contradictions import contradiction
from trainer.flags import (FLAGS, FLAGS_BY_NAME, GROUPS, OPTIONS, OPTIONS_BY_NAME, PATHS,
                           SETTINGS)

_HELP = {'--help', '--helpshort', '-h', '-help', '-helpshort'}


def help_text(summary):
    """The text of --help: a summary, all flags in groups, and the names of all options."""
    lines = [summary]
    for group, settings in GROUPS.items():
        lines += ['%s:' % group] + _described(settings, '--')
    return '\n'.join(lines + textwrap.wrap(
        'Options of --config, which --config=help describes: %s.' % ', '.join(
            option.name for option in OPTIONS), 98, subsequent_indent='  '))


def _described(settings, prefix):
    """Lines about settings: a sentence each, with the values that there are, and the default."""
    lines = []
    for name, default, limits, _, text in settings:
        words = ', '.join(filter(None, limits)) if isinstance(limits, list) else ''
        lines += textwrap.wrap(
            '%s%s (%s).' % (text, ': ' + words if words and name in ('optimizer', 'decay') else '',
                            "''" if default == '' else default),
            98, initial_indent='  %-22s ' % (prefix + name), subsequent_indent=' ' * 25)
    return lines


def parse_flags(argv, summary=''):
    """Parses flags as absl does, and the options of --config.

    Args:
      argv: list of strings, the program first.
      summary: first line of the help.

    Returns:
      The arguments that are no flags: the program alone.

    Raises:
      SystemExit: after the help, which is in groups, or an error, which is one line (status 2).
    """
    if _HELP & set(argv[1:]) or '--config=help' in argv:
        print('\n'.join(_described(OPTIONS, '')) if '--config=help' in argv else
              help_text(summary))
        sys.exit(0)
    try:
        argv = FLAGS.read_flags_from_files(argv, force_gnu=False)
        _refuse_options(argv[1:])
        rest = FLAGS(argv)
        for config in FLAGS.config:
            _take_options(config)
    except flags.Error as error:
        text = re.sub(r"invalid literal for int\(\) with base 10: .*", 'expected a whole number',
                      str(error))
        text = re.sub('could not convert string to float: .*', 'expected a number', text)
        refuse(re.sub(r"\('Non-boolean argument .*", 'expected true or false', text))
    except BadFileError as error:
        refuse(error)
    if len(rest) > 1:
        refuse('%r is no flag: flags begin with --' % rest[1])
    for name in PATHS:  # as of a shell, which leaves --train_dir=~/run as it is
        FLAGS[name].value = os.path.expanduser(re.sub('^file://(?=/)', '', FLAGS[name].value))
    wrong = contradiction({name for name in FLAGS if FLAGS[name].present})
    if wrong:
        refuse(wrong)
    return rest


def _refuse_options(arguments):
    """Ends the program where an argument is an option of --config."""
    for argument in arguments:
        name = argument.lstrip('-').partition('=')[0]
        for name in (name, re.sub('^no', '', name)) if argument.startswith('-') else ():
            if name in OPTIONS_BY_NAME:
                refuse('%s is no flag: give --config=\'{"%s": …}\', or a JSON file that has it'
                       % (name, name))


def _take_options(config):
    """Sets the options of one --config, the path of a JSON file or its text."""
    if config.lstrip().startswith('{'):
        try:
            values = json.loads(config)
        except (ValueError, RecursionError) as error:
            refuse('--config=%s is no JSON: %s' % (shown(config[:60]), error))
    else:
        values = read_json(config, {str: SCALAR}, 'write {"label_smoothing": 0.1}')
        if values is None:
            refuse('--config=%s does not exist: name a JSON file, or give {"label_smoothing": 0.1}'
                   % config)
    for name, value in values.items():
        if name not in OPTIONS_BY_NAME:
            near = difflib.get_close_matches(name, OPTIONS_BY_NAME, 1)
            refuse('--config: there is no option %s%s' % (shown('%.60r' % name), (
                ', but a flag --%s: give that' % name if name in FLAGS_BY_NAME else
                ': did you mean %s?' % near[0] if near else
                '; --help lists those there are')))
        default = OPTIONS_BY_NAME[name].default
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool):
            refuse('--config: %s is %s: expected %s' % (name, shown('%.60s' % json.dumps(value)), {
                bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a string'
                }[type(default)]))
        FLAGS[name].parse(value)
        FLAGS[name].present = 1


# ---- Errors in the words of flags ----------------------------------------------------------------

# Advice in errors of `towers` about arguments of calls (a pattern), and the same about flags.
_PHRASES = [
    (r'[,;]? or pass resolve_devices\(…[^.]*', ', or see its plan with --plan_only'),
    (r' \(recover=True\)| \(towers\.init_from\)', ''),
    (r'create_aux_logits=False', 'aux_loss_weight=0'),
    (r'\b(takes no|needs a) data_dir', r'\1 --data_dir'),
    (r"\bVariablePlacement\('([^']*)'\)", r'--variable_device=\1')]
_ARGUMENT = re.compile(r"(?<![\w\-./])([a-z]\w*)=('[^']*'|[\w.+\-]*[\w+](?![\w/]))")
_OPTION = re.compile(r'(?<![\w\-./])(?:--)?(no)?(%s)\b(=[\w.+\-]*\w)?(?! of --config)' % '|'.join(
    OPTIONS_BY_NAME))


def in_flags(text):
    """The text of an error of `towers`, with flags in place of the arguments they stand for."""
    for pattern, instead in _PHRASES:
        text = re.sub(pattern, instead, text)

    def flag(found):
        name, value = found.groups()
        if name == 'devices' and not FLAGS['devices'].value:
            name = 'num_towers'
        return '--%s=%s' % (name, value.strip("'")) if name in SETTINGS else found.group(0)

    def option(found):  # no flag: '--keep', and 'keep=3'
        is_named = found.group().startswith('--') or found.group(3)
        return '%s%s of --config' % (found.group(2), found.group(3) or '') if is_named else (
            found.group())
    return _OPTION.sub(option, _ARGUMENT.sub(flag, text))


def refuse(reason):
    """Prints one line that says why the program does not start, and exits with status 2."""
    say(' '.join(str(reason).split()))
    sys.exit(2)


def say(reason):
    """Prints an error, or its text, as one line on standard error."""
    sys.stderr.write('train.py: %s\n' % ' '.join(in_flags(str(reason)).splitlines()))
