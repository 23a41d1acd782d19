"""Random numbers of the copies of one Keras model: each copy draws its own."""

import contextlib
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.graph_walk import Recording


class DrawsOfCopies:
    """Seeds for the calls of one model in several towers, so that they share no dropout mask.

    Most random operations have seeds of their own anyway. Copies would draw the same

    * with a layer's `seed=` (TF 1.15; later Keras counts it up with each call), and
    * with a graph-level seed in the branches of TF 2's `tf.cond`, which dropout makes under a
      learning phase: there an operation's seed is its place in the branch.

    So with a graph-level seed, the calls after the first are made under another one; without,
    operations with a seed get another one.

    Nothing is changed where the first call has operations with a gradient of their own. These may
    compute something a second time for the gradient, and then have to draw the same again.
    """

    def __init__(self, graph):
        self._graph = graph
        self._keeps = False

    @contextlib.contextmanager
    def call(self, index):
        """The context of the model's call in the tower of that number."""
        seed = self._graph.seed
        changes = index and not self._keeps
        with Recording(self._graph) as made:
            if changes and seed is not None:
                tf.set_random_seed(_other_seed(seed, 0, index))
            try:
                yield
            finally:
                if changes and seed is not None:
                    tf.set_random_seed(seed)
        if not index:
            self._keeps = any(op.type == 'IdentityN' for op in made.operations)
        if changes and seed is None:
            for op in made.operations:
                if op.op_def is not None and _SEEDS <= {attr.name for attr in op.op_def.attr}:
                    seeds = [op.get_attr(name) for name in ('seed', 'seed2')]
                    if any(seeds):
                        compat.set_attribute(op, 'seed2', tf.AttrValue(
                            i=_other_seed(seeds[0], seeds[1], index)))


_SEEDS = {'seed', 'seed2'}


def _other_seed(seed, seed2, index):
    return zlib.crc32(('%s %s copy %d' % (seed, seed2, index)).encode()) % 2 ** 31 or 1
