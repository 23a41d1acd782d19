"""Networks of models/ with fewer of the blocks that they repeat, which build in a part of the time.

Every layer that a network makes outside of its repeated blocks is there, and so are the first and
the last block of each kind, with the names that they have.
"""

import contextlib
import typing
from unittest import mock

from tf_slim.nets import resnet_v1, resnet_v2

from models import inception_resnet_v2


class Replacement(typing.NamedTuple):
    """A function that takes the place of a function of a module.

    Attributes:
      module: the module.
      name: the name of the function in it.
      function: the function.
    """
    module: typing.Any
    name: str
    function: typing.Callable


def replacements(most, asked=None):
    """The `Replacement`s with which networks make at most so many of each block that they repeat.

    Args:
      most: the most blocks.
      asked: a list to which each network, as it is built, appends its full numbers of blocks.
    """
    def fewer(times):
        if asked is not None:
            asked.append(times)
        return min(times, most)

    repeat = inception_resnet_v2._repeat

    def repeat_fewer(net, scope, times, *args, **kwargs):
        return repeat(net, scope, fewer(times), *args, **kwargs)

    found = [Replacement(inception_resnet_v2, '_repeat', repeat_fewer)]
    for module, name in ((resnet_v1, 'resnet_v1_block'), (resnet_v2, 'resnet_v2_block')):
        def block(scope, base_depth, num_units, stride, make=getattr(module, name)):
            return make(scope, base_depth, fewer(num_units), stride)
        found.append(Replacement(module, name, block))
    return found


@contextlib.contextmanager
def fewer_blocks(most):
    """A scope in which networks make at most so many of each block that they repeat; 0: all."""
    with contextlib.ExitStack() as stack:
        if most:
            for replacement in replacements(most):
                stack.enter_context(mock.patch.object(*replacement))
        yield
