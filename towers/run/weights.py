"""The weights of a trained model: their moving averages, and a SavedModel of them."""

import contextlib
import os
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import (
    check_function,
    check_instance,
    check_number,
    check_step_variable,
    checked_path,
    listed_variables,
)
from towers.checkpoint.files import READ_ERRORS, counter_in, first_line
from towers.checkpoint.match import check_fits
from towers.errors import CheckpointError, InvalidArgumentError, counted
from towers.graph import graph_walk
from towers.graph.variable_access import variables_read
from towers.placement.variable_device import only_device
from towers.safe_files import folder_written_whole

_AVERAGE = '/ExponentialMovingAverage'  # what TensorFlow adds to the name of a variable
_MOST_DECAY = 1 - 2 ** -24  # the largest float32 below 1
_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)  # the types that a signature takes


class WeightAverages:
    """Exponential moving averages of trained variables, by `tf.train.ExponentialMovingAverage`.

        average <- average - (1 - d) * (average - variable),   d = min(decay, (1 + t) / (10 + t))

    after each step t. Checkpoints have the averages, under the names
    `<variable>/ExponentialMovingAverage`.
    """

    def __init__(self, decay: float, global_step: tf.Variable):
        """
        Args:
          decay: a number in (0, 1), such as 0.999.
          global_step: the variable that counts steps: t of the formula.

        Raises:
          InvalidArgumentError: the decay is outside of (0, 1), or `global_step` is no variable that
            counts steps.
        """
        check_number('decay', decay, above=0, most=_MOST_DECAY,
                     expected='a number between 0 and 1, such as 0.999')
        check_step_variable(global_step)
        self._averages = tf.train.ExponentialMovingAverage(float(decay), global_step)
        # {name of a variable: its average}
        self._by_name: typing.Dict[str, tf.Variable] = {}

    def update_after(self, train_op: tf.Operation,
                     variables: typing.Sequence[tf.Variable]) -> tf.Operation:
        """Makes the averages of variables, and the operation that updates them after a step.

        Args:
          train_op: the operation that updates the weights.
          variables: list of the variables to average, the trained ones.

        Returns:
          The operation of a step: it runs `train_op`, then updates the averages.

        Raises:
          InvalidArgumentError: `train_op` is no operation; `variables` is empty, or has a variable
            twice, of whole numbers, or of another graph; or this is a second call, since each
            variable has one average.
        """
        check_instance('train_op', train_op, (tf.Operation, tf.Tensor),
                       'the operation that updates the weights, such as built.train_op')
        if train_op.graph is not tf.get_default_graph():
            raise InvalidArgumentError('train_op is %r of another graph than the default one.'
                                       % train_op.name)
        variables = listed_variables('variables', variables)
        if not variables:
            raise InvalidArgumentError('variables=[]: expected the variables to average.')
        for variable in variables:
            if not variable.dtype.is_floating:
                raise InvalidArgumentError('variables holds %r of type %s: expected variables of '
                                           'floats.' % (variable.op.name,
                                                        variable.dtype.base_dtype.name))
        if self._by_name:
            raise InvalidArgumentError('update_after was called before, for %s: pass all in one '
                                       'call.' % counted(len(self._by_name), 'variable'))
        # Beside the train op, whatever device is chosen around this call.
        with tf.control_dependencies([train_op]), only_device(train_op.device or None):
            updated = self._averages.apply(variables)
        self._by_name = {variable.op.name: self._averages.average(variable)
                         for variable in variables}
        return updated

    @contextlib.contextmanager
    def instead_of_weights(self) -> typing.Iterator[None]:
        """A context in which `get_variable` gives the average of a variable that has one.

        It is for the towers of an evaluation whose model makes its variables with `get_variable`,
        as slim and `tf.layers` do.

        Raises:
          InvalidArgumentError: at the end of the block, if an operation made in it reads a weight
            that has an average, as with variables of `tf.Variable` or Keras.
        """
        if not self._by_name:
            raise InvalidArgumentError('there are no averages yet: call update_after first.')

        def average_or_variable(getter: typing.Callable, name: str, *args: typing.Any,
                                **kwargs: typing.Any) -> typing.Any:
            """The custom getter: the average of a variable that has one, else the variable."""
            variable = getter(name, *args, **kwargs)
            op = getattr(variable, 'op', None)  # a partitioned variable has none
            return variable if op is None else self._by_name.get(op.name, variable)

        # The same scope once more, for the sake of the getter: no name changes.
        with graph_walk.Recording(tf.get_default_graph()) as made, tf.variable_scope(
                tf.get_variable_scope(), custom_getter=average_or_variable,
                auxiliary_name_scope=False):
            yield
        for variable in variables_read(made.operations):
            if variable.op.name in self._by_name:
                raise InvalidArgumentError(
                    'what was built instead_of_weights() reads variable %r, not its average: only '
                    'tf.get_variable can give another variable, and this one was made or kept '
                    'otherwise (by tf.Variable, or in a Keras layer). Make it with '
                    'tf.get_variable.' % variable.op.name)


def averages_in(checkpoint: str, variables: typing.Iterable[tf.Variable]
                ) -> typing.Tuple[typing.Dict[str, typing.Any], int]:
    """The names in a checkpoint from which to restore variables: those of their moving averages,
    where the checkpoint has these.

    It is for a graph that evaluates or exports, and makes no averages itself. In a graph with
    `WeightAverages` there are a weight `w` and its average, and both would be restored from
    `w/ExponentialMovingAverage`. The dict then has the later one of `variables` under that name: in
    `tf.global_variables()` that is the average.

    Args:
      checkpoint: the prefix of the checkpoint.
      variables: the variables to be restored, parts of partitioned ones included.

    Returns:
      `(names, count)`: a dict from names in the checkpoint to variables, or to lists of the parts
      of partitioned ones, for `tf.train.Saver`; and how many of the variables have an average in
      the checkpoint, or are an average.
    """
    names_saved = {name for name, _ in tf.train.list_variables(checkpoint)}
    # {name by which a `Saver` keeps a variable: the variable, or the list of its parts}
    by_own_name: typing.Dict[str, typing.Any] = {}
    for variable in variables:
        name, _ = compat.saved_as(variable)
        if compat.is_part(variable):
            by_own_name.setdefault(name, []).append(variable)
        else:
            by_own_name[name] = variable
    names = {}
    num_averages = 0
    for name, variable in by_own_name.items():
        name_of_average = name + _AVERAGE
        if name_of_average in names_saved:
            name = name_of_average
        # The name ends so for a weight with an average, and for a variable that is an average.
        if name.endswith(_AVERAGE):
            num_averages += 1
        names[name] = variable
    return names, num_averages


# ---- SavedModel ----------------------------------------------------------------------------------

def export_saved_model(build: typing.Callable, checkpoint: str, directory: str) -> str:
    """Writes a SavedModel that TF Serving and `tf.saved_model.load` read.

    The model is built in a graph of its own, without devices, and its variables are restored by
    their names, which are the same in a checkpoint of N towers and of one device. Where the
    checkpoint has moving averages of weights, the averages are exported as the weights.

    Args:
      build: called without arguments under a fresh graph; returns `(inputs, outputs)`, two dicts
        from the names in the signature to tensors.
      checkpoint: prefix of a checkpoint.
      directory: the directory of all versions of the model. The new version goes into a folder in
        it, named by the checkpoint's global step: TF Serving serves the highest number.

    Returns:
      The folder that was written. Its signature is `'serving_default'`, method
      `tensorflow/serving/predict`.

    Raises:
      InvalidArgumentError: this version exists already, or the directory cannot be written to;
        `build` returned something else.
      CheckpointError: the checkpoint cannot be read, has no global step, or is of another model.
    """
    check_function('build', build, 0, 'a function without arguments that returns (inputs, outputs)')
    checkpoint = checked_path('checkpoint', checkpoint, 'the prefix of a checkpoint')
    directory = checked_path('directory', directory)
    try:
        step = counter_in(checkpoint, 'global_step')
    except READ_ERRORS as error:
        raise CheckpointError('%s cannot be exported: %s. Expected the prefix of a checkpoint with '
                              'a global_step, such as model.ckpt-500.' % (
                                  checkpoint, first_line(error))) from error
    target = os.path.join(directory, str(step))
    if tf.io.gfile.exists(target) or os.path.lexists(target):  # also a link to nothing
        raise InvalidArgumentError('%s exists already: an export of step %d. Remove it, or export '
                                   'elsewhere.' % (target, step))
    with tf.Graph().as_default():
        # With enable_op_determinism TF refuses random operations without a seed; none is run here.
        tf.set_random_seed(0)
        inputs, outputs = _checked_signature(build())
        names, _ = averages_in(checkpoint, tf.global_variables())
        check_fits(checkpoint, names)
        saver = tf.train.Saver(dict(names, **_tables_in(checkpoint)))
        signature = tf.saved_model.predict_signature_def(inputs, outputs)
        with tf.Session() as session:
            saver.restore(session, checkpoint)
            try:
                _write_saved_model(session, signature, target)
            except (OSError, tf.errors.OpError) as error:
                raise InvalidArgumentError(
                    '%s cannot be written: %s. Export to a directory that can be made and written '
                    'to.' % (target, first_line(error))) from error
    return target


def _tables_in(checkpoint: str) -> typing.Dict[str, typing.Any]:
    """{name: what a `Saver` keeps of it} of the tables that change, and the like, of the default
    graph; raises `CheckpointError` if the checkpoint lacks the content of one."""
    names_saved = {name for name, _ in tf.train.list_variables(checkpoint)}
    tables = {}
    for saveable in tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS):
        for spec in saveable.specs:
            if spec.name not in names_saved:
                raise CheckpointError('%s cannot be exported: it has no %s. Expected a checkpoint '
                                      'of this model.' % (checkpoint, spec.name))
        tables[saveable.name] = saveable
    return tables


def _write_saved_model(session: tf.Session, signature: typing.Any, target: str) -> None:
    """Writes the graph and the variables of a session as a SavedModel for a server.

    Args:
      session: the session, with the variables restored.
      signature: the `SignatureDef` of the model.
      target: the folder to be made.
    """
    signature_key = tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    # A server loads a folder with a number as soon as it sees it.
    with folder_written_whole(target) as unfinished:
        builder = tf.saved_model.Builder(unfinished)
        builder.add_meta_graph_and_variables(
            session, [tf.saved_model.tag_constants.SERVING], {signature_key: signature},
            main_op=tf.tables_initializer(), strip_default_attrs=True)
        builder.save()


def _checked_signature(built: typing.Any) -> typing.Tuple[dict, dict]:
    """What `build` of `export_saved_model` has returned, checked: `(inputs, outputs)`, two dicts of
    tensors of the default graph."""
    is_pair = isinstance(built, (tuple, list)) and len(built) == 2
    if not is_pair or not all(map(_is_dict_of_tensors, built)):
        raise InvalidArgumentError('build returned %.200r: expected (inputs, outputs), two dicts '
                                   'from names to tensors of the graph that it is called under.'
                                   % (built,))
    inputs, outputs = built
    return inputs, outputs


def _is_dict_of_tensors(given: typing.Any) -> bool:
    """Whether a value is a dict with at least one entry, all of them tensors of the default graph.
    """
    graph = tf.get_default_graph()
    if not isinstance(given, dict) or not given:
        return False
    for value in given.values():
        # A ragged tensor has no attribute `graph`.
        if not isinstance(value, _TENSORS) or getattr(value, 'graph', graph) is not graph:
            return False
    return True
