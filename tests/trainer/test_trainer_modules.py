"""The modules of trainer/: each imports from those below it alone."""

import ast
import glob
import os

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


def test_imports_go_one_way():
    left = imports()
    assert len(left) > 20 and {'flags', 'training'} <= left['train']
    while left:
        lowest = [name for name, modules in left.items() if not modules & set(left)]
        assert lowest, 'these import each other: %s' % sorted(left)
        for name in lowest:
            del left[name]
