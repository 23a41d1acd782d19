"""Marks for the cases of a test, of which `make test` runs some."""

import pytest


def first_fast(count, cases):
    """The cases for `pytest.mark.parametrize`, of which those after the first `count` are slow."""
    marked = list(cases[:count])
    for case in cases[count:]:
        arguments = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*arguments, marks=pytest.mark.slow))
    return marked
