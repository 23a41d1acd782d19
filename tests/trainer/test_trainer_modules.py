"""The modules of trainer/: each imports from those below it alone."""

import ast
import glob
import os
import re

import pages


def imports():
    """{a module of trainer/, or `train`: those of trainer/ that it imports}."""
    found = {}
    for path in glob.glob(os.path.join(pages.ROOT, 'trainer', '*.py')) + [
            os.path.join(pages.ROOT, 'train.py')]:
        with open(path, encoding='utf-8') as source:
            nodes = list(ast.walk(ast.parse(source.read())))
        modules = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                modules |= {node.module} | {'%s.%s' % (node.module, alias.name)
                                            for alias in node.names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
        found[os.path.basename(path)[:-len('.py')]] = {
            name.split('.')[1] for name in modules if name.startswith('trainer.')}
    return {name: modules & set(found) for name, modules in found.items()}


def rows():
    """The table of docs/architecture.md: a list of the modules of each row."""
    section = pages.text('docs/architecture.md').split('## The trainer')[1].split('\n## ')[0]
    return [re.findall('`([^`]+)`', row) for row in re.findall(r'^\| (`[^|]*) \|', section, re.M)]


def test_imports_go_one_way():
    left = imports()
    while left:
        lowest = [name for name, modules in left.items() if not modules & set(left)]
        assert lowest, 'these import each other: %s' % sorted(left)
        for name in lowest:
            del left[name]


def test_the_table_has_all_modules_from_above_to_below():
    found, table = imports(), rows()
    assert sorted(sum(table, ['__init__', 'train'])) == sorted(found)
    place = {name: number for number, row in enumerate(table) for name in row}
    assert [(name, each) for name in place for each in found[name]
            if place[each] < place[name]] == []
