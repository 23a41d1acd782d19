"""The command line of train.py: parses flags, shows the help, says errors in the words of flags.

Neither this module nor the modules that it imports import TensorFlow, which takes seconds: so a
typing error is said at once. Its test is tests/trainer/test_trainer_flags.py.
"""

import difflib
import json
import os
import re
import sys
import textwrap
import typing

from absl import flags

from trainer.contradictions import contradiction
from trainer.flags import (
    FLAGS,
    FLAGS_BY_NAME,
    GROUPS,
    OPTIONS,
    OPTIONS_BY_NAME,
    PATHS,
    SETTINGS,
    Setting,
)

_HELP_WIDTH = 98
_HELP = {'--help', '--helpshort', '-h', '-help', '-helpshort'}
# Settings of which the help lists the choices. The texts of other settings name their choices.
_CHOICES_NOT_IN_TEXT = ('optimizer', 'decay')


def help_text(summary: str) -> str:
    """The text of --help.

    Args:
      summary: the first line of the text.

    Returns:
      The summary, all flags in their groups, and the names of all options of --config: at most 100
      columns, and two screens.
    """
    lines = [summary]
    for group, settings in GROUPS.items():
        lines.append('%s:' % group)
        lines += _described(settings, '--')
    option_names = ', '.join(option.name for option in OPTIONS)
    lines += textwrap.wrap('Options of --config, which --config=help describes: %s.' % option_names,
                           _HELP_WIDTH, subsequent_indent='  ')
    return '\n'.join(lines)


def _described(settings: typing.Iterable[Setting], prefix: str) -> typing.List[str]:
    """The lines of the help about some settings: a sentence each, with choices and default.

    Args:
      settings: the settings, in order.
      prefix: what is written before their names: '--', or '' for options.
    """
    lines = []
    for setting in settings:
        text = setting.text
        if setting.name in _CHOICES_NOT_IN_TEXT:
            text += ': ' + ', '.join(setting.limits)
        if setting.default not in ('', []):
            text += ' (%s)' % setting.default
        lines += textwrap.wrap(
            text + '.', _HELP_WIDTH,
            initial_indent='  %-22s ' % (prefix + setting.name), subsequent_indent=' ' * 25)
    return lines


def parse_flags(argv: typing.List[str], summary: str = '') -> typing.List[str]:
    """Parses flags as absl does, and the options of --config.

    Args:
      argv: list of strings, the program first.
      summary: the first line of the help.

    Returns:
      The arguments that are no flags: only the program.

    Raises:
      SystemExit: after the help (status 0), or after a line about an error (status 2).
    """
    if '--config=help' in argv:
        print('\n'.join(_described(OPTIONS, '')))
        sys.exit(0)
    if _HELP & set(argv[1:]):
        print(help_text(summary))
        sys.exit(0)
    rest = _parsed(argv)
    if len(rest) > 1:
        refuse('%r is no flag: flags begin with --' % rest[1])
    for name in PATHS:
        FLAGS[name].value = _local_path(str(FLAGS[name].value))
    given = {name for name in FLAGS if FLAGS[name].present}
    wrong = contradiction(given)
    if wrong:
        refuse(wrong)
    return rest


def _parsed(argv: typing.List[str]) -> typing.List[str]:
    """Gives `FLAGS` the values of a command line; returns the arguments that are no flags, the
    program first. Ends the program if a value is not of its flag's type or range."""
    try:
        # --flagfile=… becomes the flags in that file, so that `_refuse_options` sees them.
        argv = FLAGS.read_flags_from_files(argv, force_gnu=False)
        _refuse_options(argv[1:])
        rest = FLAGS(argv)
        for config in FLAGS.config:
            _take_options(config)
        return rest
    except flags.Error as error:
        refuse(_without_python(str(error)))


def _local_path(path: str) -> str:
    """A path as this machine's: 'file:///data' becomes '/data', and '~' the user's home.

    A shell does not expand the ~ in --train_dir=~/run.
    """
    scheme = 'file://'
    if path.startswith(scheme + '/'):
        path = path[len(scheme):]
    return os.path.expanduser(path)


def _without_python(text: str) -> str:
    """The text of an error of absl about a value, with plain words about what was expected.

    absl quotes the error of `int` or `float`, which says more about Python than about the value.
    """
    text = re.sub(r'invalid literal for int\(\) with base 10: .*', 'expected a whole number', text)
    text = re.sub('could not convert string to float: .*', 'expected a number', text)
    return re.sub(r"\('Non-boolean argument .*", 'expected true or false', text)


def _refuse_options(arguments: typing.List[str]) -> None:
    """Ends the program if an option of --config was given as a flag.

    Args:
      arguments: the arguments of the command line, without the program.
    """
    for argument in arguments:
        if not argument.startswith('-'):
            continue
        name = argument.lstrip('-').partition('=')[0]
        name_without_no = re.sub('^no', '', name)  # --noxla is how absl takes --xla=false
        for option in (name, name_without_no):
            if option in OPTIONS_BY_NAME:
                refuse('%s is no flag: give --config=\'{"%s": …}\', or a JSON file that has it'
                       % (option, option))


def _take_options(config: str) -> None:
    """Sets the options of one --config.

    Args:
      config: the path of a JSON file; or the JSON itself, which begins with a brace.
    """
    if config.lstrip().startswith('{'):
        values = _options_of_text(config)
    else:
        values = _options_of_file(config)
    for name, value in values.items():
        if name not in OPTIONS_BY_NAME:
            _refuse_unknown_option(name)
        _check_kind(name, value)
        FLAGS[name].parse(value)
        FLAGS[name].present = 1  # as absl marks a flag that was given


def _options_of_text(text: str) -> dict:
    """The options in a JSON object: {name: value}."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse('--config=%s is no JSON: %s' % (_escaped(text[:60]), error))


def _options_of_file(path: str) -> dict:
    """The options in a JSON file: {name: value}."""
    from towers.errors import BadFileError  # imports TensorFlow, so not at the top
    from towers.safe_files import SCALAR, read_json
    try:
        # The form `{str: SCALAR}` is an object whose values are numbers, texts, true or false.
        values = read_json(path, {str: SCALAR}, 'write {"label_smoothing": 0.1}')
    except BadFileError as error:
        refuse(error)
    if values is None:
        refuse('--config=%s does not exist: name a JSON file, or give {"label_smoothing": 0.1}'
               % path)
    return values


def _escaped(text: str) -> str:
    """A text with line breaks, and control characters of a terminal, escaped."""
    return ascii(text)[1:-1]


def _refuse_unknown_option(name: str) -> typing.NoReturn:
    """Ends the program, since there is no option of that name.

    The line names the flag of that name, if there is such a flag; else the option with the most
    similar name.
    """
    similar = difflib.get_close_matches(name, OPTIONS_BY_NAME, 1)
    if name in FLAGS_BY_NAME:
        advice = ', but a flag --%s: give that' % name
    elif similar:
        advice = ': did you mean %s?' % similar[0]
    else:
        advice = '; --help lists those there are'
    refuse('--config: there is no option %.60a%s' % (name, advice))


def _check_kind(name: str, value: typing.Any) -> None:
    """Ends the program if the value of an option is of another type than its default.

    For an option that is a number, a whole number is of its type as well; true and false are not.

    Args:
      name: the name of the option.
      value: the value, as JSON gives it.
    """
    kind = type(OPTIONS_BY_NAME[name].default)
    fits = type(value) is kind
    if kind is float:
        fits = type(value) in (int, float)
    if not fits:
        expected = {bool: 'true or false', int: 'a whole number', float: 'a number',
                    str: 'a string'}[kind]
        refuse('--config: %s is %.60s: expected %s' % (name, json.dumps(value), expected))


# ---- Errors in the words of flags ----------------------------------------------------------------

# Patterns of phrases in errors of `towers`, about arguments of calls; each with its replacement,
# which is about flags.
_PHRASES = [
    (r'[,;]? or pass resolve_devices\(…[^.]*', ', or see its plan with --plan_only'),
    (r' \(recover=True\)| \(towers\.init_from\)', ''),
    (r'create_aux_logits=False', 'aux_loss_weight=0'),
    (r'\b(takes no|needs a) data_dir', r'\1 --data_dir'),
    (r"\bVariablePlacement\('([^']*)'\)", r'--variable_device=\1')]
# An argument of a call, `precision='fp16'`: its name and its value.
_ARGUMENT = re.compile(r"(?<![\w\-./='])([a-z]\w*)=('[^']*'|[\w.+\-]*[\w+](?![\w/]))")
# An option's name as a flag or alone, with or without a value: `--keep`, `--noxla`, `keep=3`,
# `keep`; not where ' of --config' is said already.
_OPTION = re.compile(r'(?<![\w\-./])(?:--)?(no)?(%s)\b(=[\w.+\-]*\w)?(?! of --config)' % '|'.join(
    OPTIONS_BY_NAME))


def in_flags(text: str) -> str:
    """The text of an error of `towers`, in the words of the command line.

        precision='fp16': expected …     becomes     --precision=fp16: expected …
        keep=3                           becomes     keep=3 of --config

    Args:
      text: the text of the error, about arguments of calls.

    Returns:
      The text with flags in place of the arguments that they stand for.
    """
    for pattern, in_words_of_flags in _PHRASES:
        text = re.sub(pattern, in_words_of_flags, text)
    text = _ARGUMENT.sub(_as_flag, text)  # makes `keep=3` a flag as well, though it is an option
    return _OPTION.sub(_as_option, text)


def _as_flag(found: typing.Match) -> str:
    """The flag for an argument such as `precision='fp16'`; the same text if there is none.

    Args:
      found: a match of `_ARGUMENT`.
    """
    name, value = found.groups()
    if name == 'devices' and not FLAGS['devices'].value:
        name = 'num_towers'  # that flag has made the argument `devices`
    if name not in SETTINGS:
        return found.group()
    return '--%s=%s' % (name, value.strip("'"))


def _as_option(found: typing.Match) -> str:
    """The words for an option in an error: `keep=3 of --config` for `--keep=3`, `xla of --config`
    for `--noxla`.

    A bare word such as `keep` stays: it may be a word of the sentence.

    Args:
      found: a match of `_OPTION`.
    """
    _, name, value = found.groups()  # the first group is the 'no'
    is_bare_word = not found.group().startswith('--') and not value
    if is_bare_word:
        return found.group()
    return '%s%s of --config' % (name, value or '')


def refuse(reason: typing.Any) -> typing.NoReturn:
    """Prints one line that says why the program does not start, and exits with status 2."""
    say(' '.join(str(reason).split()))
    sys.exit(2)


def say(reason: typing.Any) -> None:
    """Prints an error, or its text, as one line on standard error."""
    sys.stderr.write('train.py: %s\n' % ' '.join(in_flags(str(reason)).splitlines()))
