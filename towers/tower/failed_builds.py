"""A build that fails: the graph's collections are as before it, and no build follows in the graph.

TensorFlow cannot remove an operation. The graph still has the failed build's operations and
variables, so that another build would make `w_1` where one device has `w`.
"""

import contextlib
import weakref

from towers import compat
from towers.errors import FailedBuildError

_FAILED = weakref.WeakSet()
"""The graphs in which a build has failed after it had made operations."""


def check_no_failed_build(graph):
    """Raises `FailedBuildError` where a build has failed in a graph."""
    if graph in _FAILED:
        raise FailedBuildError(
            'a build_towers in this graph has failed, and TensorFlow cannot remove what it made: '
            'build in a new graph (with tf.Graph().as_default(): …, or tf.reset_default_graph()).')


@contextlib.contextmanager
def undone_on_error(graph, put_collections_back):
    """The context of a build, which undoes it on an error.

    Args:
      graph: the `tf.Graph`.
      put_collections_back: function without arguments that gives the graph's collections the
        contents that they had before the build.
    """
    before, restore = len(graph.get_operations()), compat.keep_variable_stores(graph)
    try:
        yield
    except BaseException:
        put_collections_back()
        restore()
        if len(graph.get_operations()) > before:
            _FAILED.add(graph)
        raise
