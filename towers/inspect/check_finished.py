"""A finished model for `check_towers`, which makes graphs of its own.

The program is made in each of them from its meta graph, as `tf.train.import_meta_graph` does it,
before anything else is there.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError, ModelFunctionError
from towers.graph import graph_walk
from towers.graph.edit import copied_functions, rename_functions
from towers.graph.graph_walk import fetches_in, map_leaves
from towers.model.losses import registered_losses
from towers.model.outputs import ModelOutput

_COLLECTIONS = (
    tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES,
    tf.GraphKeys.METRIC_VARIABLES, tf.GraphKeys.UPDATE_OPS, tf.GraphKeys.REGULARIZATION_LOSSES,
    tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.GLOBAL_STEP, tf.GraphKeys.COND_CONTEXT,
    tf.GraphKeys.WHILE_CONTEXT)


_NUMBERS = itertools.count(1)
"""Of the functions of a program that is made once more: TF 2 keeps functions by process."""


class MadeProgram(typing.NamedTuple):
    """A program with a finished model, made in a graph."""
    model: ModelOutput
    entries: typing.Dict[tf.Tensor, tf.Tensor]
    """{tensor at which the batch enters: tensor of the sample batch}."""


class FinishedProgram:
    """A program with a finished model, as its meta graph.

    Attributes:
      batch: tuple of the arrays of the sample batch.
    """

    def __init__(self, model: typing.Any, inputs: typing.Any, feed: typing.Optional[dict]):
        """
        Args:
          model: `ModelOutput` of tensors of the default graph.
          inputs: dict from tensors at which the batch enters to arrays [n, …].
          feed: dict from other placeholders to their values, or None.

        Raises:
          InputError: `inputs` or `feed` are none of these.
          ModelFunctionError: a model that cannot be made in another graph.
        """
        for name, given in (('inputs', inputs), ('feed', feed or {})):
            if not isinstance(given, dict) or not all(isinstance(key, tf.Tensor) for key in given):
                raise InputError(
                    '%s=%.80r: of a finished model expected a dict from its placeholders to arrays.'
                    % (name, given))
        self._output = model
        self._check_is_portable()
        self._names = [tensor.name for tensor in inputs]
        self._fed = {tensor.name: (value, tensor.dtype) for tensor, value in (feed or {}).items()}
        self._dtypes = [tensor.dtype for tensor in inputs]
        self.batch = tuple(inputs.values())
        registered_losses()
        self._definition = tf.train.export_meta_graph(collection_list=list(_COLLECTIONS))

    def _check_is_portable(self):
        for op in graph_walk.step_operations(fetches_in(tuple(self._output))):
            if compat.has_gradient_closure(op):
                raise ModelFunctionError(
                    '%s has a gradient by tf.custom_gradient, which is bound to its graph, and '
                    'check_towers makes others: pass a model function.' % op.name)

    def on_one_device(self, batch: tuple) -> ModelOutput:
        """Makes the program in the default graph, which is empty, on the arrays of a batch."""
        self._made(dict(zip(self._names, self._constants(batch))))
        return self._output_here()

    def for_towers(self, batch: tuple) -> MadeProgram:
        """Makes the program in the default graph, which is empty, and tensors of a batch."""
        constants = self._constants(batch)
        self._made({})
        graph = tf.get_default_graph()
        tensors = [graph.get_tensor_by_name(name) for name in self._names]
        return MadeProgram(self._output_here(), dict(zip(tensors, constants)))

    def _constants(self, batch):
        with tf.name_scope('check_towers_batch'):
            return [tf.constant(array, dtype) for array, dtype in zip(batch, self._dtypes)]

    def _made(self, replaced):
        with tf.name_scope('check_towers_feed'):
            replaced.update((name, tf.constant(value, dtype))
                            for name, (value, dtype) in self._fed.items())
        definition = type(self._definition)()
        definition.CopyFrom(self._definition)
        library = definition.graph_def.library
        known = {each.signature.name: each for each in library.function}
        copies, names = copied_functions(known, 'check_%d' % next(_NUMBERS), lambda *_: None)
        del library.function[:]
        library.function.extend(copies)
        for each in library.gradient:
            each.function_name = names[each.function_name]
            each.gradient_func = names[each.gradient_func]
        for node in definition.graph_def.node:
            rename_functions(node, names)
        tf.train.import_meta_graph(definition, input_map=replaced)

    def _output_here(self):
        graph = tf.get_default_graph()

        def here(leaf):
            return graph.as_graph_element(leaf.name)
        return ModelOutput(*map_leaves(here, tuple(self._output)))
