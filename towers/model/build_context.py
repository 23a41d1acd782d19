"""The context of a build: the builds that are refused in a graph, and its collections around one.

A build within the model function of another one would put towers into each tower. After a build
that fails the graph's collections are as before it, but TensorFlow cannot remove an operation:
another build would make `w_1` where one device has `w`.
"""

import collections
import contextlib
import itertools
import typing
import weakref

import tensorflow.compat.v1 as tf

from towers.errors import FailedBuildError, ModelFunctionError

_CALLS = weakref.WeakKeyDictionary()
"""The graphs in which a model function is being called, each with its `_Call`."""


_Call = collections.namedtuple('_Call', 'variables parts refused numbers')
"""A call of a model function: `NewVariables`, how many parts the batch has, why they exchange no
values or None, and the numbers of these values, an iterator."""


def check_not_nested(graph):
    """Raises `ModelFunctionError` where a model function is being called in a graph."""
    if graph in _CALLS:
        raise ModelFunctionError(
            'build_towers is called within the model function of another build of this graph, or a '
            'ParallelModel is, or a function of replicate_model_fn: the batch is cut for the '
            'devices already. Call the model itself there: the inner_model of a ParallelModel, the '
            'model function that replicate_model_fn was given. Several builds go one after the '
            'other.')


@contextlib.contextmanager
def call_of_model_fn(graph, variables, parts, refused=None):
    """The context of the call of a model function, in which no other build is made; `refused` says
    why values of the whole batch are not to be had in this build, or is None."""
    _CALLS[graph] = _Call(variables, parts, refused, itertools.count(1))
    try:
        yield
    finally:
        del _CALLS[graph]


def current_call(graph):
    """The `_Call` of the model function that is being called in a graph; None if there is none."""
    return _CALLS.get(graph)


_FAILED = weakref.WeakSet()
"""The graphs in which a build has failed after it had made operations."""


def check_no_failed_build(graph):
    """Raises `FailedBuildError` where a build has failed in a graph."""
    if graph in _FAILED:
        raise FailedBuildError(
            'a build_towers in this graph has failed, and TensorFlow cannot remove what it made: '
            'build in a new graph (with tf.Graph().as_default(): …, or tf.reset_default_graph()).')


_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


def updates_of_no_build(graph: tf.Graph) -> list:
    """The `UPDATE_OPS` of a graph that no build has made: a list."""
    of_builds = set(graph.get_collection(_UPDATES_OF_BUILDS))
    return [update for update in graph.get_collection(tf.GraphKeys.UPDATE_OPS)
            if _name_of(update) not in of_builds]


class BuildCollections:
    """The collections of a graph, as they were before a build.

    `updates` are the `UPDATE_OPS` from before the build, of a batch norm in preprocessing for
    example, without updates of an earlier build in this graph, which belong to its step.
    """

    def __init__(self, graph: tf.Graph, of_model: typing.Sequence = ()):
        """`of_model` are `UPDATE_OPS` of a finished model, which the towers compute."""
        self._graph, self._before = graph, _snapshot(graph)
        of_model = set(map(_name_of, of_model))
        self.updates = [update for update in updates_of_no_build(graph)
                        if _name_of(update) not in of_model]

    def new_updates(self) -> list:
        """The `UPDATE_OPS` that are there now and were not before the build: a list."""
        return without(self._graph.get_collection(tf.GraphKeys.UPDATE_OPS),
                       self._before.get(tf.GraphKeys.UPDATE_OPS, ()))

    @contextlib.contextmanager
    def of_build(self) -> typing.Iterator[None]:
        """The context of the build, whose new `UPDATE_OPS` are noted in the graph as its own; after
        an error every collection has its former entries again."""
        count = len(self._graph.get_operations())
        try:
            yield
        except BaseException:
            for key in set(_snapshot(self._graph)) | {key for key, entries in self._before.items()
                                                      if entries}:
                self._graph.get_collection_ref(key)[:] = self._before.get(key, [])
            if len(self._graph.get_operations()) > count:
                _FAILED.add(self._graph)
            raise
        for entry in self.new_updates():
            self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))


def without(entries, others):
    """The entries of a collection that are none of the others: a list."""
    others = set(map(id, others))
    return [entry for entry in entries if id(entry) not in others]


def _snapshot(graph):
    # Keys that are no strings, or private ones, hold TF's own stores, not entries.
    return {key: list(graph.get_collection_ref(key)) for key in graph.get_all_collection_keys()
            if isinstance(key, str) and not key.startswith('_')}


def _name_of(entry):
    return getattr(getattr(entry, 'op', entry), 'name', None)
