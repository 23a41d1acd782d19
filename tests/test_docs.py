"""README.md and docs/: programs run as pasted, commands and links exist."""

import glob
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap

from absl.testing import flagsaver
import pytest
import tensorflow

import forked_launcher
import pages
import towers
import train_runs
from towers import compat
from trainer.flags import FLAGS, OPTIONS_BY_NAME

PAGES_OF_ONE_PROGRAM = [page for page in pages.names()
                        if pages.blocks(page, 'python') and page != 'docs/api.md']
DIFFS = [block for page in pages.names() for block in pages.blocks(page, 'diff')]


def skip_without_estimator(page):
    return [pytest.mark.skip('no tf.estimator')] if (
        page == 'docs/estimator.md' and not compat.has_estimator()) else []


def place(block):
    return '%s:%d' % (block.page, block.line)


@pytest.fixture(scope='module')
def run_program(runner, tmp_path_factory):
    """Function that runs a program in a process and a folder of its own; returns its output."""
    return lambda source: runner.source(source, tmp_path_factory.mktemp('page')).stdout


@pytest.mark.slow
@pytest.mark.parametrize('page', [
    pytest.param(page, marks=skip_without_estimator(page))
    for page in PAGES_OF_ONE_PROGRAM])
def test_the_python_of_a_page_runs_and_prints_what_stands_below_it(page, run_program):
    programs = [block for block in pages.blocks(page, 'python') if not pages.own_name(block)]
    output = pages.printed(run_program(pages.program(programs)))
    shown = pages.blocks(page)
    for block, below in zip(shown, shown[1:] + [None]):
        if block in programs and below is not None and below.language == 'text':
            actual = output[block.line].splitlines()
            assert pages.is_printed(below.lines, actual), '%s: it printed\n%s' % (
                place(below), output[block.line])


FILES = [block for page in pages.names() for block in pages.blocks(page, 'python')
         if pages.own_name(block)]


@pytest.mark.slow
@pytest.mark.parametrize('block', FILES, ids=place)
def test_a_file_of_a_page_prints_what_stands_below_its_commands(block, runner, tmp_path):
    name = pages.own_name(block)
    (tmp_path / name).write_text('\n'.join(block.lines) + '\n')
    for number, (command, output) in enumerate(
            pair for each in pages.blocks(block.page, 'console') if each.line > block.line
            for pair in pages.commands(each) if re.search(r'\b%s[.:]' % name[:-3], pair[0])):
        words, folder = shlex.split(command)[1:], tmp_path
        if words[0] == 'train.py':  # in the folder of the file, as its runs go on
            printed = runner.python([train_runs.TRAIN] + words[1:], folder).stdout
        else:
            folder /= str(number)
            folder.mkdir()
            words = [os.path.join('..', name) if word == name else word for word in words]
            if number:  # the first one starts Python as from a shell
                assert words[:2] == ['-m', 'towers.launch']
                printed = runner.python([forked_launcher.__file__] + words[2:], folder).stdout
            else:
                printed = subprocess.run(
                    [sys.executable] + words, cwd=str(folder), stdout=subprocess.PIPE, timeout=150,
                    check=True, universal_newlines=True,
                    env=dict(os.environ, PYTHONPATH=pages.ROOT)).stdout
        assert pages.is_printed(output, printed.splitlines()), printed


LOSSES = '''
if 'losses' not in globals():  # a part of a program, up to its train_op
    import zlib as _zlib
    import numpy as _np
    import towers as _towers
    with tf.Session(config=_towers.session_config(devices)) as _session:
        _session.run(tf.global_variables_initializer())
        for _each in tf.trainable_variables():  # whatever seeds their initial values have
            _numbers = _np.random.RandomState(_zlib.crc32(_each.op.name.encode()))
            _each.load(_numbers.randn(*_each.shape.as_list()) * 0.1, _session)
        losses = [_session.run([loss, train_op])[0] for _ in range(3)]
print('%slosses', [float(each) for each in losses], flush=True)
''' % pages.MARK


def readme_example():
    """The text of examples/readme.py, the program around the diff of README.md."""
    with open(os.path.join(pages.ROOT, 'examples', 'readme.py'), encoding='utf-8') as source:
        return source.read()


def readme_setup():
    """What that program does before the lines of the diff, as a block of Python."""
    before, _, _ = readme_example().partition('    built = ')
    functions, _, body = before.partition('def main():\n')
    return pages.Block('README.md', 1, 'python', (
        functions + 'tf.disable_v2_behavior()\n' + textwrap.dedent(body)).splitlines())


def losses_of(block, run_program):
    """The losses of a few steps of one side of a diff, after the page's own blocks before it.

    A side that imports something is a whole program.
    """
    parts = [block]
    if block.page == 'README.md':
        parts = [readme_setup(), block]
    elif not any(line.startswith('import ') for line in block.lines):
        parts = [each for each in pages.blocks(block.page, 'python')
                 if each.line < block.line] + parts
    output = run_program(pages.program(parts, LOSSES))
    return json.loads(output.rpartition(pages.MARK + 'losses')[2])


# Sides of a diff that are compared with nothing: packages, or devices, that are not here.
COMPARED_NOWHERE = ('multi_gpu_model', 'from deployment import ')


@pytest.mark.parametrize('block', [
    pytest.param(block, id=place(block),
                 marks=[pytest.mark.slow] + skip_without_estimator(block.page))
    for block in DIFFS])
def test_before_and_after_a_diff_are_the_same_numbers(block, run_program):
    if any('ParallelModel' in line for line in block.lines) and compat.is_keras_3(
            tensorflow.keras.layers.Layer()):
        pytest.skip('fit of Keras 3 does not work in graph mode')
    after = losses_of(pages.side(block, '+'), run_program)
    assert len(after) >= 3 and after[-1] != after[0]
    before = pages.side(block, '-')
    if not any(name in line for line in before.lines for name in COMPARED_NOWHERE):
        assert losses_of(before, run_program) == pytest.approx(after, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(tensorflow.version.VERSION < '2', reason="TF 1's flatten has the batch's size in it")
def test_example_of_the_readme_has_its_diff_and_prints_what_stands_there(run_program):
    (diff,), (console, *_) = pages.blocks('README.md', 'diff'), pages.blocks('README.md', 'console')
    added = [line[1:] for line in diff.lines if line.startswith('+')]
    assert len(diff.lines) <= 15
    assert textwrap.indent('\n'.join(added) + '\n', '    ') in readme_example()
    (command, output), = pages.commands(console)
    assert command == 'python -m examples.readme'
    printed = run_program(readme_example())
    assert pages.is_printed(output, printed.splitlines()), printed


def test_readme_fits_three_screens():
    lines = pages.text('README.md').splitlines()
    assert len(lines) <= 180


@pytest.mark.parametrize('page', pages.names() + ['BUILD_NOTES.md'])
def test_lines_of_prose_have_100_characters_at_most(page):
    of_blocks = {number for block in pages.blocks(page)
                 for number in range(block.line, block.line + len(block.lines))}
    long = ['%s:%d' % (page, number) for number, line in enumerate(
        pages.text(page).splitlines(), 1)
            if len(line) > 100 and number not in of_blocks and not line.startswith('| ')]
    assert not long


@pytest.mark.parametrize('page', pages.names())
def test_every_block_says_what_it_is(page):
    for block in pages.blocks(page):
        assert block.language in ('python', 'diff', 'console', 'text', 'json'), place(block)


HEADING = re.compile(r'^#+ (.*)$', re.MULTILINE)
LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')


def anchors(page):
    """The anchors of a page's headings, as code hosts and MkDocs make them."""
    prose = re.sub(r'^```.*?^```$', '', pages.text(page), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).strip().replace(' ', '-')
            for heading in HEADING.findall(prose)}


@pytest.mark.parametrize('page', pages.names())
def test_links_lead_somewhere(page):
    prose = re.sub(r'^```.*?^```$', '', pages.text(page), flags=re.MULTILINE | re.DOTALL)
    for target in LINK.findall(prose):
        if target.startswith('https://'):
            continue
        path, _, anchor = target.partition('#')
        there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.exists(os.path.join(pages.ROOT, there)), '%s: %s' % (page, target)
        if anchor:
            assert anchor in anchors(there), '%s: %s' % (page, target)


COMMANDS = [(block, command, output) for page in pages.names()
            for block in pages.blocks(page, 'console')
            for command, output in pages.commands(block)]


def modules_of_targets():
    """A dict from the Makefile's targets to the program of ours that each runs, or `''`."""
    with open(os.path.join(pages.ROOT, 'Makefile')) as makefile:
        text = makefile.read()
    return {target: (re.search(r'python (?:-m )?(train\.py|benchmarks\S+)', recipe) or ['', ''])[1]
            for target, recipe in re.findall(r'^([\w-]+):.*\n((?:\t.*\n)*)', text, re.MULTILINE)}


def check_flags(program, arguments):
    """Whether a program of this repository has these flags."""
    if program == 'train.py':
        assert not {each.lstrip('-').partition('=')[0] for each in arguments} & set(OPTIONS_BY_NAME)
        with flagsaver.flagsaver():
            FLAGS.unparse_flags()
            FLAGS(['train.py'] + [each for each in arguments if each != '--help'])
        return
    if program in {pages.own_name(block) for block in FILES}:  # a file that stands on a page
        return
    name = program[:-3] if program.endswith('.py') else program.replace('.', '/')
    assert glob.glob(os.path.join(pages.ROOT, name + '*')), program
    source = ''  # of the program or of what its parts have in common
    for path in glob.glob(os.path.join(pages.ROOT, name + '*')) + glob.glob(
            os.path.join(pages.ROOT, name, '*.py')) + glob.glob(
                os.path.join(pages.ROOT, 'benchmarks', '*.py')):
        if os.path.isfile(path):
            with open(path, encoding='utf-8') as opened:
                source += opened.read()
    for argument in arguments:
        assert "'%s'" % argument.partition('=')[0] in source, argument


def extras():
    """The names of the extras that setup.py declares."""
    with open(os.path.join(pages.ROOT, 'setup.py'), encoding='utf-8') as setup:
        declared = setup.read().partition('extras_require=')[2]
    return set(re.findall(r"^ +'([a-z-]+)': ", declared, re.MULTILINE)) | {
        'tf-layers-2.%d' % minor for minor in range(16, 22)}


@pytest.mark.parametrize('block, command, output', [
    pytest.param(*each, id='%s: %s' % (place(each[0]), each[1][:60])) for each in COMMANDS])
def test_commands_exist(block, command, output):
    words = shlex.split(command)
    while words and re.match(r'[A-Z_]+=', words[0]):
        words.pop(0)
    words = words[:words.index('|')] if '|' in words else words
    program, arguments = words[0], words[1:]
    if program == 'make':
        targets = modules_of_targets()
        for word in arguments:
            name, given, value = word.partition('=')
            if not given:
                target = word
                assert target in targets, word
            elif name == 'ARGS':
                if targets[target]:  # of pytest's and MkDocs' own there is nothing to check
                    check_flags(targets[target], shlex.split(value))
            else:
                assert name in ('PYTHON', 'VENV', 'PINS')
    elif program.endswith('python'):
        arguments = arguments[1:] if arguments[0] == '-m' else arguments
        if '--' in arguments:  # of the launcher: what it starts
            started = arguments[arguments.index('--') + 1:]
            check_flags(started[0], started[1:])
            arguments = arguments[:arguments.index('--')]
        check_flags(arguments[0], arguments[1:])
    elif program == 'pip':
        assert arguments[0] == 'install'
        for name in re.findall(r'\[([^]]+)\]', command):
            assert set(name.split(',')) <= extras(), name
    else:
        assert program in ('nvidia-smi', 'tensorboard', 'cat', 'export'), command


def train_arguments(command):
    """The flags of train.py in a command; None for another command."""
    words = shlex.split(command)
    if words[:2] == ['make', 'train']:
        return sum([shlex.split(word[len('ARGS='):]) for word in words[2:]], [])
    return words[2:] if words[0].endswith('python') and words[1] == 'train.py' else None


# Without those on ImageNet, see test_paper_setting.
RUN = [pytest.param(block, command, output, id=command[:60])
       for block, command, output in COMMANDS
       if output and train_arguments(command) is not None and '/data/imagenet' not in command
       # Not those with their file, of an earlier run, and of several runs (test_sweep).
       and not re.search(r'--(model|hooks)=\w+:|--mode=eval|--sweep', command)]


@pytest.mark.slow
@pytest.mark.parametrize('block, command, output', RUN)
def test_commands_print_what_stands_below_them(block, command, output, runner, tmp_path):
    run = runner.start(tmp_path / 'run', train_arguments(command))
    run.status()
    printed = run.stdout + run.stderr
    assert pages.is_printed(output, printed.splitlines()), '%s: it printed\n%s' % (
        place(block), printed)
    if command == 'make train':  # two towers learn the digits
        assert float(re.search(r'test accuracy  ([.\d]+) on 360', printed).group(1)) > 0.97


def test_every_public_name_is_in_the_reference():
    listed = set(re.findall(r'^- `(\w+)`', pages.text('docs/api.md'), re.MULTILINE))
    public = {name for name in dir(towers) if not name.startswith('_') and type(
        getattr(towers, name)) is not type(towers)}
    assert listed == public


def test_signatures_of_the_reference_are_the_real_ones():
    text = '\n'.join(line for block in pages.blocks('docs/api.md', 'text') for line in block.lines)
    shown = re.findall(r'^(\w+)\((.*?)\)', text, re.MULTILINE)
    assert len(shown) >= 5
    for name, arguments in shown:
        real = iter(str(inspect.Parameter(each.name, each.kind, default=each.default))
                    for each in inspect.signature(getattr(towers, name)).parameters.values())
        for argument in arguments.split(', '):
            assert argument in ('*', '…') or argument in real, (name, argument)
    fields = re.search('-> BuiltTowers: (.*?), …', text, re.DOTALL).group(1)
    assert set(re.split(r',\s+', fields)) <= set(towers.BuiltTowers._fields)


def test_the_reference_has_each_field_of_each_public_tuple():
    """As the renderer reads it: one name a line, and no other than the fields and properties."""
    looked_at = []
    for name in dir(towers):
        kind = getattr(towers, name)
        if not (isinstance(kind, type) and hasattr(kind, '_fields')):
            continue
        looked_at.append(name)
        text = inspect.cleandoc(kind.__doc__)
        assert '\nAttributes:\n' in text, name
        listed = re.findall(r'^  (\w[^:\n]*):', text.split('\nAttributes:\n')[1], re.MULTILINE)
        assert listed == list(kind._fields), name
    assert {'ModelOutput', 'Tower', 'BuiltTowers', 'Plan', 'TowersReport', 'Audit', 'LossScale',
            'Numerics', 'VariablePlacement'} <= set(looked_at)


@pytest.mark.slow
def test_the_picture_of_a_build_is_drawn_from_one(run_program):
    """Both towers multiply, add their gradients up once, and update once."""
    with open(os.path.join(pages.ROOT, 'docs', 'draw_graph.py'), encoding='utf-8') as source:
        drawn = run_program(source.read())
    boxes = re.findall('<title>(.*?)</title>.*?>([A-Za-z_]+)</text>', drawn)
    kinds = [kind for _, kind in boxes]
    assert kinds.count('VarHandleOp') == 1 and kinds.count('ReadVariableOp') == 2
    assert kinds.count('ApplyGradientDescent') == 1 and kinds.count('train_op') == 1
    assert {name.split('/')[0] for name, kind in boxes if kind == 'MatMul'} == {
        'MatMul', 'gradients', 'tower_1'}
