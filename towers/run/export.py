"""A SavedModel of the trained model: one device, no towers."""

import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_function, directory_name
from towers.checkpoint.files import READ_ERRORS, counter_in, first_line
from towers.checkpoint.match import check_fits
from towers.errors import CheckpointError, InvalidArgumentError
from towers.run.averages import averages_in
from towers.safe_files import folder_written_whole

_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)  # as a signature takes them
_SIGNATURE = tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY


def export_saved_model(build: typing.Callable, checkpoint: str, directory: str) -> str:
    """Writes a SavedModel that TF Serving and `tf.saved_model.load` read.

    The model is built in a graph of its own, without devices, and its variables are restored by
    their names, which are the same in a checkpoint of N towers and of one device. Where the
    checkpoint has moving averages of weights, the averages are exported as the weights.

    Args:
      build: called without arguments under a fresh graph; returns `(inputs, outputs)`, two dicts
        from the names in the signature to tensors.
      checkpoint: prefix of a checkpoint.
      directory: of all versions of the model. The new one goes into a folder in it, named by the
        checkpoint's global step: TF Serving serves the highest number.

    Returns:
      The folder that was written. Its signature is `'serving_default'`, method
      `tensorflow/serving/predict`.

    Raises:
      InvalidArgumentError: this version exists already, or the directory cannot be written to;
        `build` returned something else, or made no variable.
      CheckpointError: the checkpoint cannot be read, has no global step, or is of another model.
    """
    check_function('build', build, 0, 'a function without arguments that returns (inputs, outputs)')
    checkpoint = directory_name('checkpoint', checkpoint, 'the prefix of a checkpoint')
    directory = directory_name('directory', directory)
    try:
        step = counter_in(checkpoint, 'global_step')
    except READ_ERRORS as error:
        raise CheckpointError('%s cannot be exported: %s. Expected the prefix of a checkpoint with '
                              'a global_step, such as model.ckpt-500.' % (
                                  checkpoint, first_line(error).rstrip('.'))) from error
    target = os.path.join(directory, str(step))
    if tf.io.gfile.exists(target) or os.path.lexists(target):
        raise InvalidArgumentError('%s exists already: an export of step %d. Remove it, or export '
                                   'elsewhere.' % (target, step))
    with tf.Graph().as_default():
        tf.set_random_seed(0)  # deterministic operations are refused without; nothing is drawn
        inputs, outputs = _checked_signature(build())
        names, _ = averages_in(checkpoint, tf.global_variables())
        check_fits(checkpoint, names)
        saver = tf.train.Saver(names)
        signature = tf.saved_model.predict_signature_def(inputs, outputs)
        with tf.Session() as session:
            saver.restore(session, checkpoint)
            try:
                # A server loads a folder with a number as soon as it sees it.
                with folder_written_whole(target) as unfinished:
                    builder = tf.saved_model.Builder(unfinished)
                    builder.add_meta_graph_and_variables(
                        session, [tf.saved_model.tag_constants.SERVING], {_SIGNATURE: signature},
                        main_op=tf.tables_initializer(), strip_default_attrs=True)
                    builder.save()
            except (OSError, tf.errors.OpError) as error:
                raise InvalidArgumentError(
                    '%s cannot be written: %s. Export to a directory that can be made and written '
                    'to.' % (target, first_line(error))) from error
    return target


def _checked_signature(built):
    """`(inputs, outputs)` of what the caller's function built in the default graph."""
    if not isinstance(built, (tuple, list)) or len(built) != 2 or not all(
            isinstance(part, dict) and part for part in built):
        raise InvalidArgumentError('build returned %.200r: expected (inputs, outputs), two dicts '
                                   'from names to tensors.' % (built,))
    for part in built:
        for name, tensor in part.items():
            if not isinstance(name, str) or not isinstance(tensor, _TENSORS) or (
                    getattr(tensor, 'graph', tf.get_default_graph()) is not tf.get_default_graph()):
                raise InvalidArgumentError('build returned %.80r for the name %.80r: expected a '
                                           'tensor of the graph that it is called under.' % (
                                               tensor, name))
    if not tf.global_variables():
        raise InvalidArgumentError('build made no variable: expected those of the model, under '
                                   'their names in the checkpoint.')
    return built
