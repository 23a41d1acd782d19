"""The context of a build: which builds a graph refuses, and the graph's collections around a build.

A build within the model function of another build would put towers into each tower. After a build
that fails, the graph's collections are as they were before, but TensorFlow cannot remove an
operation: the next build in the graph would make `w_1` where one device has `w`.
"""

import contextlib
import itertools
import typing
import weakref

import tensorflow.compat.v1 as tf

from towers.errors import FailedBuildError, ModelFunctionError


class Call(typing.NamedTuple):
    """A call of a model function.

    Attributes:
      variables: `NewVariables`, which records the variables that the call makes.
      num_parts: how many parts the batch has, on all machines.
      has_equal_parts: whether a static size of one part is the size of every part.
      no_batch_values: why the parts exchange no values of the whole batch in this build; or None.
      numbers: counts from 1; gives each value of the whole batch a number.
    """
    variables: typing.Any
    num_parts: int
    has_equal_parts: bool
    no_batch_values: typing.Optional[str]
    numbers: typing.Iterator[int]


_CALLS: 'weakref.WeakKeyDictionary[tf.Graph, Call]' = weakref.WeakKeyDictionary()
"""The graphs in which a model function is being called, each with its `Call`."""


def check_not_nested(graph: tf.Graph) -> None:
    """Raises `ModelFunctionError` if a model function of another build is being called in a graph.
    """
    if graph in _CALLS:
        raise ModelFunctionError(
            'build_towers is called within the model function of another build of this graph, or a '
            'ParallelModel is, or a function of replicate_model_fn: the batch is cut for the '
            'devices already. Call the model itself there: the inner_model of a ParallelModel, the '
            'model function that replicate_model_fn was given. Several builds go one after the '
            'other.')


@contextlib.contextmanager
def call_of_model_fn(graph: tf.Graph, variables: typing.Any, num_parts: int,
                     has_equal_parts: bool = True,
                     no_batch_values: typing.Optional[str] = None) -> typing.Iterator[None]:
    """The context of the call of a model function, in which no other build is made.

    Args:
      graph: the graph that it is called in.
      variables: `NewVariables`, which records the variables that the call makes.
      num_parts, has_equal_parts, no_batch_values: see `Call`.
    """
    _CALLS[graph] = Call(variables, num_parts, has_equal_parts, no_batch_values,
                         numbers=itertools.count(1))
    try:
        yield
    finally:
        del _CALLS[graph]


def current_call(graph: tf.Graph) -> typing.Optional[Call]:
    """The `Call` of the model function that is being called in a graph; None if there is none."""
    return _CALLS.get(graph)


def variables_of_optimizer(graph: tf.Graph) -> typing.ContextManager:
    """The context, in the call of a model function, in which its optimizer makes slots: these slots
    are not recorded as variables of the model."""
    return _CALLS[graph].variables.unrecorded()


_FAILED: 'weakref.WeakSet[tf.Graph]' = weakref.WeakSet()
"""The graphs in which a build has failed after it had made operations."""


def check_no_failed_build(graph: tf.Graph) -> None:
    """Raises `FailedBuildError` if an earlier build in a graph has failed."""
    if graph in _FAILED:
        raise FailedBuildError(
            'a build_towers in this graph has failed, and TensorFlow cannot remove what it made: '
            'build in a new graph (with tf.Graph().as_default(): …, or tf.reset_default_graph()).')


_BUILT: 'weakref.WeakSet[tf.Graph]' = weakref.WeakSet()
"""The graphs in which a build was made."""


def has_towers(graph: tf.Graph) -> bool:
    """Whether `build_towers` has made towers in a graph."""
    return graph in _BUILT


_UPDATES_OF_BUILDS = ('towers_update_ops',)
"""A key that is no string, like the keys of TF's own stores, so that no meta graph holds it."""


def updates_of_no_build(graph: tf.Graph) -> list:
    """List of the `UPDATE_OPS` of a graph that no build has made."""
    names_of_builds = set(graph.get_collection(_UPDATES_OF_BUILDS))
    return _without_names(_updates_in(graph), names_of_builds)


def _updates_in(graph: tf.Graph) -> list:
    """The `UPDATE_OPS` of a graph; `ModelFunctionError` if one belongs to another graph."""
    updates = graph.get_collection(tf.GraphKeys.UPDATE_OPS)
    for update in updates:
        if getattr(update, 'graph', graph) is not graph:
            raise ModelFunctionError(
                'the collection UPDATE_OPS holds %r, which belongs to another graph: add '
                'operations of the graph in which the model is.' % _name_of(update))
    return updates


class BuildCollections:
    """The collections of a graph as they were before a build.

    Attributes:
      updates: list of the `UPDATE_OPS` from before the build, such as the updates of a batch norm
        in preprocessing. The updates of an earlier build in this graph belong to that build's step,
        the updates of a finished model to the towers: both are left out.
    """

    def __init__(self, graph: tf.Graph, updates_of_model: typing.Iterable = ()):
        """Notes what the collections hold.

        Args:
          graph: the graph, before the build.
          updates_of_model: the `UPDATE_OPS` of a finished model.
        """
        self._graph = graph
        self._before = _snapshot(graph)
        names_of_model = set(map(_name_of, updates_of_model))
        self.updates = _without_names(updates_of_no_build(graph), names_of_model)

    def new_updates(self) -> list:
        """List of the `UPDATE_OPS` that were added since the beginning of the build."""
        return without(_updates_in(self._graph), self._before.get(tf.GraphKeys.UPDATE_OPS, ()))

    @contextlib.contextmanager
    def of_build(self) -> typing.Iterator[None]:
        """The context of the build.

        At its end, the new `UPDATE_OPS` are noted in the graph as made by a build, so that no other
        build runs them. After an error, every collection has its former entries again.
        """
        num_before = len(self._graph.get_operations())
        try:
            yield
        except BaseException:
            self._restore()
            has_made_operations = len(self._graph.get_operations()) > num_before
            if has_made_operations:  # which TensorFlow cannot remove
                _FAILED.add(self._graph)
            raise
        _BUILT.add(self._graph)
        for entry in self.new_updates():
            self._graph.add_to_collection(_UPDATES_OF_BUILDS, _name_of(entry))

    def _restore(self) -> None:
        """Gives every collection its former entries; a collection that the build has made becomes
        empty."""
        # A collection that the build has cleared has its key in `_before` alone.
        keys = _snapshot(self._graph).keys() | self._before.keys()
        for key in keys:
            self._graph.get_collection_ref(key)[:] = self._before.get(key, [])


def without(entries: typing.Iterable, others: typing.Iterable) -> list:
    """List of the entries that are not among the others. Entries are compared as objects, not by
    equality."""
    other_ids = set(map(id, others))
    return [entry for entry in entries if id(entry) not in other_ids]


def _without_names(entries: typing.Iterable, names: typing.Container) -> list:
    """List of the entries of a collection whose operations have none of these names."""
    return [entry for entry in entries if _name_of(entry) not in names]


def _snapshot(graph: tf.Graph) -> typing.Dict[str, list]:
    """{key: list of the entries} of a graph's collections."""
    entries = {}
    for key in graph.get_all_collection_keys():
        # Under keys that are no strings, or private ones, TensorFlow keeps objects of its own, such
        # as its store of variable scopes: a failed build leaves these as they are.
        if isinstance(key, str) and not key.startswith('_'):
            entries[key] = list(graph.get_collection_ref(key))
    return entries


def _name_of(entry: typing.Any) -> typing.Optional[str]:
    """The name of the operation of an entry of a collection; None for an entry without one."""
    return getattr(getattr(entry, 'op', entry), 'name', None)
