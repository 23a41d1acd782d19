"""Code of the user's own: `module:function` of a flag, found, called, its errors named.

Its test is tests/datasets/test_own.py.
"""

import contextlib
import importlib
import inspect
import os
import sys
import typing

from datasets.errors import OwnDataError
from towers import compat
from towers.errors import InvalidArgumentError, TowersError


def own_function(name: str, flag: str = 'dataset', kind: type = OwnDataError,
                 example: str = 'flowers:batches for the function batches of flowers.py'
                 ) -> typing.Callable:
    """Imports the function that `module:function` names.

    Args:
      name, flag, kind: as for `calling`.
      example: an example of a name, for the error.

    Raises:
      InvalidArgumentError: there is no such module or function.
      kind: the module raised an error.
    """
    module_name, _, function_name = name.partition(':')
    is_relative = module_name.startswith('.')  # to a package; a flag is in no package
    if not module_name or is_relative or not function_name:
        raise InvalidArgumentError('--%s=%s: expected module:function, such as %s.' % (
            flag, name, example))
    function = getattr(_module(name, module_name, flag, kind), function_name, None)
    if not callable(function):
        raise InvalidArgumentError('The module %s has no function %r, which --%s=%s names.' % (
            module_name, function_name, flag, name))
    return function


def _module(name, module_name, flag, kind):
    """Imports the module, from the working directory, or as an installed module.

    Args:
      name, flag, kind: as for `calling`.
      module_name: the part of `name` before the colon.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with calling(name, 'the module %s' % module_name, flag, kind):
        try:
            return importlib.import_module(module_name)
        except ImportError as error:
            raise InvalidArgumentError(
                'Cannot import the module of --%s=%s: %s. It has to be in the working directory, '
                'or installed.' % (flag, name, error)) from None


def takes(function: typing.Any, *arguments: typing.Any, **named: typing.Any) -> bool:
    """Whether a function can be called with these arguments; True for a built-in function whose
    signature Python does not know."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # Python does not know its signature
        pass
    return True


@contextlib.contextmanager
def calling(name: str, what: str, flag: str = 'dataset',
            kind: type = OwnDataError) -> typing.Iterator[None]:
    """A context for code of the user's own, whose errors become one error that names the code.

    Args:
      name: `module:function`.
      what: names the part of the code that runs, for the error.
      flag: the flag that names the code.
      kind: the class of the error.
    """
    try:
        yield
    except TowersError:
        raise
    except (Exception, SystemExit) as error:
        if compat.missing_layers(error):
            raise  # `build_towers`, which calls a model function, says what to install
        text = ' '.join(str(error).split())
        reason = ': %.200s' % text if text else ''
        raise kind('--%s=%s: %s raised %s%s' % (
            flag, name, what, type(error).__name__, reason)) from error
