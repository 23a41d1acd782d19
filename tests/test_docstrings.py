"""The parameters that a docstring lists are those of its function, in their order."""

import ast
import os
import re

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def functions_of(folder):
    """`(place, function, docstring)` of all functions and methods in a folder's files."""
    for directory, _, files in os.walk(os.path.join(ROOT, folder)):
        for name in sorted(files):
            if not name.endswith('.py'):
                continue
            path = os.path.join(directory, name)
            with open(path, encoding='utf-8') as source:
                tree = ast.parse(source.read())
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    place = '%s:%d %s' % (os.path.relpath(path, ROOT), node.lineno, node.name)
                    yield place, node, ast.get_docstring(node) or ''


def documented_names(docstring):
    """The names in the section `Args:` of a docstring, in their order; None without the section."""
    section = re.search(r'^Args:\n((?:[ ]{2}.*\n?|\n)+)', docstring, re.MULTILINE)
    if section is None:
        return None
    return re.findall(r'^  \**(\w+):', section.group(1), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize('folder', ['towers', 'trainer', 'datasets', 'models'])
def test_the_listed_parameters_are_those_of_the_function(folder):
    wrong = []
    for place, function, docstring in functions_of(folder):
        listed = documented_names(docstring)
        if listed is None:
            continue
        arguments = function.args
        parameters = [each.arg for each in arguments.args]
        if arguments.vararg is not None:
            parameters.append(arguments.vararg.arg)
        parameters += [each.arg for each in arguments.kwonlyargs]
        if arguments.kwarg is not None:
            parameters.append(arguments.kwarg.arg)
        expected = [name for name in parameters if name in listed]
        if listed != expected:
            wrong.append('%s lists %s' % (place, ', '.join(listed)))
    assert not wrong
