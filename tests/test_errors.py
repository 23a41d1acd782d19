"""Errors: `except` clauses that were written for a tower loop still catch them."""

import pytest

from towers import errors


@pytest.mark.parametrize('error, builtin', [
    (errors.InvalidArgumentError, ValueError), (errors.DeviceError, ValueError),
    (errors.InputError, ValueError), (errors.ModelFunctionError, TypeError),
    (errors.SharedVariableError, ValueError), (errors.NameScopeError, ValueError),
    (errors.CloneError, ValueError), (errors.GradientError, ValueError),
    (errors.WorkerLostError, errors.ClusterError), (errors.MissingPackageError, ImportError)])
def test_what_is_also_a_built_in_error(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, errors.TowersError)
