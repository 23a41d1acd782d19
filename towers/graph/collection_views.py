"""Looks at a graph's collections, while a model function runs."""

import contextlib


@contextlib.contextmanager
def looks_by(graph, get_collection):
    """A context in which every look at a graph's collections goes through `get_collection`.

    TensorFlow's functions all call the graph's method `get_collection`. It is replaced on this
    graph alone, since other threads may be building other graphs. Such contexts may be nested.

    Args:
      graph: `tf.Graph`.
      get_collection: function of `(name, scope=None)` that returns a list.
    """
    before = graph.get_collection
    graph.get_collection = get_collection
    try:
        yield
    finally:
        if getattr(before, '__self__', None) is graph:  # the class's own method
            del graph.get_collection
        else:
            graph.get_collection = before
