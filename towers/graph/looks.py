"""Looks at a graph's collections, while a model function runs."""

import contextlib


@contextlib.contextmanager
def looks_by(graph, get_collection):
    """A scope in which whatever looks at a collection of a graph does so by another function.

    All of TensorFlow's functions go through the graph's `get_collection`. It is replaced on this
    graph alone, since other threads may be building other graphs; such scopes may be nested.

    Args:
      graph: `tf.Graph`.
      get_collection: function of `(name, scope=None)`.
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
