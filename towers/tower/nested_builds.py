"""Refuses a build within the model function of another build.

Its towers would be towers in each tower: on the same devices again, with their updates of batch
norm once for each.
"""

import contextlib
import weakref

from towers.errors import ModelFunctionError

_IN_CALL = weakref.WeakSet()
"""The graphs in which a model function is being called."""


def check_not_nested(graph):
    """Raises `ModelFunctionError` where a model function is being called in a graph."""
    if graph in _IN_CALL:
        raise ModelFunctionError(
            'build_towers is called within the model function of another build of this graph, or a '
            'ParallelModel is, or a function of replicate_model_fn: the batch is cut for the '
            'devices already. Call the model itself there: the inner_model of a ParallelModel, the '
            'model function that replicate_model_fn was given. Several builds go one after the '
            'other.')


@contextlib.contextmanager
def call_of_model_fn(graph):
    """The context of the call of a model function, in which no other build is made."""
    _IN_CALL.add(graph)
    try:
        yield
    finally:
        _IN_CALL.discard(graph)
