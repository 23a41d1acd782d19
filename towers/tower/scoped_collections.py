"""A look at a collection by scope, which finds in a tower what it finds on one device.

`tf.losses.get_losses('generator')`, `tf.get_collection(tf.GraphKeys.UPDATE_OPS, 'generator')` and
`tf.summary.merge_all(scope='generator')` choose the entries whose names begin so. In tower 1 these
names begin with `tower_1/generator`: without this the choice would be empty, and the loss of that
tower would be without a term.
"""

import contextlib
import re


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


@contextlib.contextmanager
def looks_within(graph, root, outer):
    """A scope in which entries of collections are also chosen by their names without the tower's.

    Args:
      graph: `tf.Graph`.
      root: the name scope of the tower's operations, such as `'tower_1/'`.
      outer: the name scope that one device has in its place: `''`, or for example `'train/'`; or
        `root` itself, where the tower has no scope of its own.
    """
    original = graph.get_collection

    def get_collection(name, scope=None):
        found = original(name, scope)
        if scope is None:
            return found
        pattern, by_full_name = re.compile(scope), set(map(id, found))

        def is_chosen(entry):
            models = _without(getattr(entry, 'name', None), root, outer)
            return id(entry) in by_full_name or models is not None and pattern.match(models)
        return [entry for entry in original(name) if is_chosen(entry)]
    with contextlib.nullcontext() if root == outer else looks_by(graph, get_collection):
        yield


def _without(name, root, outer):
    """The name that one device has; None for what is not in the tower's scope."""
    if not isinstance(name, str) or not name.startswith(root):
        return None
    return outer + name[len(root):]
