"""The Markdown pages, of README.md, docs/ and results: their fenced blocks, programs of them."""

import collections
import io
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

Block = collections.namedtuple('Block', 'page line language lines')
"""A fenced block: `page` is a path from the root, `line` the number of its first line."""


def names():
    """Paths of all pages, from the root."""
    return ['README.md', 'CONTRIBUTING.md'] + sorted(
        '%s/%s' % (folder, name) for folder in ('docs', 'benchmarks/results')
        for name in os.listdir(os.path.join(ROOT, folder)) if name.endswith('.md'))


def text(page):
    """The page's text."""
    with io.open(os.path.join(ROOT, page), encoding='utf-8') as opened:
        return opened.read()


def blocks(page, *languages):
    """The page's fenced blocks, of these languages alone where some are given."""
    found, opened = [], None
    for number, line in enumerate(text(page).splitlines(), 1):
        if opened is None:
            if line.startswith('```'):
                opened = Block(page, number + 1, line[3:].strip(), [])
        elif line == '```':
            found.append(opened)
            opened = None
        else:
            opened.lines.append(line)
    assert opened is None, '%s: the block at line %d has no end' % (page, opened.line)
    return [each for each in found if not languages or each.language in languages]


def own_name(block):
    """The name of the file that a block of Python is, by its first line, such as `# own.py`; or
    None of a block that is a part of the page's program."""
    found = re.match(r'# (\w+\.py)$', (block.lines or [''])[0])
    return found and found.group(1)


MARK = '@@@ '  # before a line that the program prints for the test


def program(parts, end=''):
    """Python source of blocks, each at the line that it has on its page, for tracebacks.

    It prints `MARK` and the number of a block's first line when that block has run.
    """
    lines = []
    for block in parts:
        lines += [''] * (block.line - 1 - len(lines)) + block.lines
        lines.append("print('%s%d', flush=True)" % (MARK, block.line))
    return '\n'.join(lines + [end]) + '\n'


def printed(stdout):
    """What each block printed: a dict from its line to the text."""
    found, since = {}, ''
    for line in stdout.splitlines(True):
        if line.startswith(MARK) and line[len(MARK):].strip().isdigit():
            found[int(line[len(MARK):])] = since
            since = ''
        else:
            since += line
    return found


def side(block, sign):
    """One side of a diff: a block of the lines without a sign and of those with this one."""
    assert block.language == 'diff'
    return block._replace(language='python', lines=[
        line[1:] for line in block.lines if line[:1] in ('', ' ', sign)])


def commands(block):
    """The commands of a console block, each with the output that follows: `[(command, lines)]`."""
    found, goes_on = [], False
    for line in block.lines:
        if goes_on:
            found[-1][0] += ' ' + line.strip()
        elif line.startswith('$ '):
            found.append([line[2:], []])
        else:
            assert found, '%s:%d: output before any command' % (block.page, block.line)
            found[-1][1].append(line)
            continue
        goes_on = found[-1][0].endswith('\\')
        found[-1][0] = found[-1][0].rstrip('\\').rstrip()
    return [(re.sub(r'\s+#.*$', '', command), output) for command, output in found]


NUMBER = re.compile(r'\d(?:[\d,.:]*\d)?(?:e[-+]?\d+)?')


def blurred(line):
    """A line of output without what differs from run to run and machine to machine."""
    return ' '.join(NUMBER.sub('#', line).split())


def is_printed(expected, actual):
    """Whether the expected lines are the actual ones but for numbers; `…` stands for any lines.

    A line that ends in `…` stands for one that begins so.
    """
    pattern = ''
    for line in expected:
        if line.strip().startswith('…'):
            pattern += r'(?:.*\n)*?'
        elif line.rstrip().endswith('…'):
            pattern += re.escape(blurred(line.rstrip()[:-1])) + r'.*\n'
        else:
            pattern += re.escape(blurred(line)) + r'\n'
    return re.fullmatch(pattern, ''.join(blurred(line) + '\n' for line in actual)) is not None
