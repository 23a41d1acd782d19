"""`FinishedProgram`: a finished model in the graphs that `check_towers` makes.

`check_towers` makes a graph for one device and a graph for towers. The program with the model is
imported into each of them from its meta graph, as by `tf.train.import_meta_graph`, before anything
else is there.

Its test is tests/inspect/test_check_finished.py.
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

# The collections of the program that its imports have; others, such as summaries, are left out.
_COLLECTIONS = (
    tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES,
    tf.GraphKeys.METRIC_VARIABLES, tf.GraphKeys.UPDATE_OPS, tf.GraphKeys.REGULARIZATION_LOSSES,
    tf.GraphKeys.TABLE_INITIALIZERS, tf.GraphKeys.GLOBAL_STEP, tf.GraphKeys.COND_CONTEXT,
    tf.GraphKeys.WHILE_CONTEXT)


# Numbers for the names of imported functions.
_NUMBERS = itertools.count(1)


class MadeProgram(typing.NamedTuple):
    """A program with a finished model, imported into a graph.

    Attributes:
      model: the losses, predictions and so on of the model.
      entries: {tensor at which the batch enters: tensor of the sample batch}.
    """
    model: ModelOutput
    entries: typing.Dict[tf.Tensor, tf.Tensor]


def _check_by_tensor(name: str, given: typing.Any) -> None:
    """Raises `InputError` if `given`, the argument of this name, is no dict whose keys
    are tensors."""
    is_dict = isinstance(given, dict)
    if not is_dict or not all(isinstance(key, tf.Tensor) for key in given):
        raise InputError(
            '%s=%.80r: of a finished model expected a dict from its placeholders to arrays.'
            % (name, given))


class FinishedProgram:
    """A program with a finished model, kept as its meta graph.

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
          InputError: `inputs` or `feed` is no such dict.
          ModelFunctionError: the model cannot be made in another graph.
        """
        _check_by_tensor('inputs', inputs)
        feed = feed or {}
        _check_by_tensor('feed', feed)
        self._output = model
        self._check_is_portable()
        # The names and types of the tensors at which the batch enters.
        self._names = [tensor.name for tensor in inputs]
        self._dtypes = [tensor.dtype for tensor in inputs]
        # {name of another placeholder: (its value, its type)}
        self._fed = {tensor.name: (value, tensor.dtype) for tensor, value in feed.items()}
        self.batch = tuple(inputs.values())
        registered_losses()  # puts tensors in the place of functions
        self._definition = tf.train.export_meta_graph(collection_list=list(_COLLECTIONS))

    def _check_is_portable(self) -> None:
        """Raises `ModelFunctionError` for a model with a `tf.custom_gradient`."""
        for op in graph_walk.step_operations(fetches_in(tuple(self._output))):
            if compat.has_gradient_closure(op):
                raise ModelFunctionError(
                    '%s has a gradient by tf.custom_gradient, which is bound to its graph, and '
                    'check_towers makes others: pass a model function.' % op.name)

    def on_one_device(self, batch: tuple) -> ModelOutput:
        """Imports the program into the default graph, which is empty, with a batch of arrays in
        the place of its inputs; gives the model."""
        self._import(dict(zip(self._names, self._constants(batch))))
        return self._output_in_default_graph()

    def for_towers(self, batch: tuple) -> MadeProgram:
        """Imports the program into the default graph, which is empty, beside tensors of a batch of
        arrays; gives the model and its inputs, for `build_towers`."""
        constants = self._constants(batch)
        self._import({})
        graph = tf.get_default_graph()
        entries = [graph.get_tensor_by_name(name) for name in self._names]
        # If the program's placeholders take batches of any size, the plan has to prove equality for
        # any size. So the batch has the placeholders' static shapes, not the constants' shapes.
        fed = map(tf.placeholder_with_default, constants, [entry.shape for entry in entries])
        return MadeProgram(self._output_in_default_graph(), dict(zip(entries, fed)))

    def _constants(self, batch: tuple) -> typing.List[tf.Tensor]:
        """The arrays of a batch as constants, of the types of the program's inputs."""
        with tf.name_scope('check_towers_batch'):
            return [tf.constant(array, dtype) for array, dtype in zip(batch, self._dtypes)]

    def _import(self, replaced: typing.Dict[str, tf.Tensor]) -> None:
        """Imports the program into the default graph.

        Args:
          replaced: {name of a tensor of the program: the tensor in its place}; the values of
            `feed` are added to it.
        """
        with tf.name_scope('check_towers_feed'):
            for name, (value, dtype) in self._fed.items():
                replaced[name] = tf.constant(value, dtype)
        # A copy, since the other side also imports the program, with other names of functions.
        definition = type(self._definition)()
        definition.CopyFrom(self._definition)
        _give_functions_new_names(definition.graph_def)
        tf.train.import_meta_graph(definition, input_map=replaced)

    def _output_in_default_graph(self) -> ModelOutput:
        """The model, with the tensors and operations of the same names in the default graph."""
        graph = tf.get_default_graph()

        def by_its_name(leaf: typing.Any) -> typing.Any:
            """The tensor or operation of the default graph that has the name of a leaf."""
            return graph.as_graph_element(leaf.name)

        return ModelOutput(*map_leaves(by_its_name, tuple(self._output)))


def _give_functions_new_names(graph_def: tf.GraphDef) -> None:
    """Renames the functions of a graph, so that their import does not replace the program's own:
    TF 2 keeps one library of functions for a process."""
    library = graph_def.library
    functions = {function.signature.name: function for function in library.function}
    copies, names = copied_functions(functions, suffix='check_%d' % next(_NUMBERS))
    del library.function[:]
    library.function.extend(copies)
    for gradient in library.gradient:  # a function's gradient may be another function
        gradient.function_name = names[gradient.function_name]
        gradient.gradient_func = names[gradient.gradient_func]
    for node in graph_def.node:
        rename_functions(node, names)
