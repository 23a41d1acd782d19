"""A Keras model in towers, one a device: inputs cut, the model called, outputs merged."""

import contextlib
import zlib

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.build import build_towers
from towers.graph.graph_walk import Recording
from towers.placement.variable_device import only_device
from towers.tower.keras_calls import record_keras_calls
from towers.tower.outputs import weighted_mean

MERGED_ON = '/device:CPU:0'


class KerasTowers:
    """One Keras model in the towers of builds without an optimizer.

    A plain object, so that Keras, which takes over every layer that is an attribute of a layer,
    does not count the model twice.

    Attributes:
      model: the Keras model, whose weights all towers share.
      devices: `Devices`.
      builds: `BuiltTowers` of each call, the one on the model's own inputs first.
      updates: `[(layer, op)]` of the first towers: batch norm's, and what else layers update.
    """

    def __init__(self, model, devices):
        self.model = model
        self.devices = devices
        self.builds = []
        self.updates = []

    def on(self, inputs, masks, training):
        """Calls the model in every tower on its part of the batch.

        Args:
          inputs: list of tensors [batch, …], in the order of the model's inputs.
          masks: list of masks or Nones, one an input.
          training: as Keras gives it to `call`.

        Returns:
          `(outputs, masks, losses, updates)`: tensors [batch, …], their masks or Nones, scalar
          losses that layers add, and the operations of batch norm and the like.
        """
        records, draws = [], DrawsOfCopies(tf.get_default_graph())

        def call_model(inputs, masks):
            with record_keras_calls() as record, compat.autograph_of_layers(), \
                    draws.call(len(records)):
                outputs = _call(self.model, inputs, masks, training)
            records.append(record)
            rows = _batch_size(inputs[0])
            return {'predictions': {
                'outputs': [_with_batch_dimension(output, rows) for output in outputs],
                'logits': [_logits(output) for output in outputs],
                'masks': [compat.keras_mask(output) for output in outputs]}}

        with tf.name_scope('copies'):
            with only_device(MERGED_ON):
                count = _batch_size(inputs[0])
                padded = _padded_size(inputs[0], len(self.devices))
                inputs, masks = ([_padded(each, padded) for each in nest]
                                 for nest in (inputs, masks))
            # By calls, as copies of loops have no gradient.
            built = build_towers(call_model, (inputs, masks), None, self.devices, 'mean',
                                 remainder='weight', copies='reuse')
            with only_device(MERGED_ON):
                merged = {key: [_unpadded(each, count, padded) for each in built.predictions[key]]
                          for key in ('outputs', 'logits', 'masks')}
                outputs = [_of_logits(output, logits, of_tower) for output, logits, of_tower in
                           zip(merged['outputs'], merged['logits'],
                               built.towers[0].predictions['outputs'])]
                losses = [weighted_mean(terms, _weights(built.towers, count)) for terms in
                          zip(*[record.activity_losses(on_keras_input=True)
                                for record in records])]
        of_layers = records[0].updates_of_layers()
        known = {op for _, op in of_layers}
        others = [update for update in built.towers[0].updates
                  if getattr(update, 'op', update) not in known]
        self.builds.append(built)
        self.updates.extend(of_layers)
        return outputs, merged['masks'], losses, [op for _, op in of_layers] + others


def _call(model, inputs, masks, training):
    """The model's outputs as a list, in the order of `model.outputs`; a model may return a dict."""
    given = {} if training is None else {'training': training}
    if any(mask is not None for mask in masks):
        given['mask'] = masks if len(masks) > 1 else masks[0]
    return tf.nest.flatten(model(inputs if len(inputs) > 1 else inputs[0], **given))


# Operations whose input Keras' cross entropies take in place of their output.
_ACTIVATIONS = {'Sigmoid': tf.sigmoid, 'Softmax': tf.nn.softmax}


def identity_for_losses(tensor):
    """A copy of a tensor, of which a loss of Keras computes what it does of the tensor itself.

    Keras' cross entropies take the logits of an output that a sigmoid or softmax has made: the
    loss of the probabilities, which are 0 and 1 in the end, has neither value nor gradient there.
    Keras looks for them at the tensor and, on TF 1.15 always, at its operation.
    """
    of = tensor.op if isinstance(tensor, tf.Tensor) else None
    if of is not None and of.type in _ACTIVATIONS:
        copy = _ACTIVATIONS[of.type](of.inputs[0])
    else:
        copy = tf.identity(tensor)
    compat.set_keras_logits(copy, compat.keras_logits(tensor))
    return copy


def _logits(output):
    """What Keras' cross entropies take in place of an output [rows, …]; None for the output."""
    if not isinstance(output, tf.Tensor) or output.shape.ndims == 0:
        return None
    logits = compat.keras_logits(output)
    if logits is None and output.op.type in _ACTIVATIONS:
        logits = output.op.inputs[0]
    return logits


def _of_logits(merged, logits, of_tower):
    """The merged output, with its logits where Keras looks for them, see `identity_for_losses`."""
    if logits is None:
        return merged
    if compat.keras_logits(of_tower) is None:
        return _ACTIVATIONS[of_tower.op.type](logits)
    compat.set_keras_logits(merged, logits)
    return merged


def _batch_size(tensor):
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    static = tensor.shape.as_list()[0]
    return tf.shape(tensor)[0] if static is None else static


def _padded_size(tensor, num_towers):
    """The size of a batch in which every tower has an example; None where this one is as large."""
    size = _batch_size(tensor)
    if isinstance(size, int):
        return None if size >= num_towers else num_towers
    return None if num_towers == 1 else tf.maximum(size, num_towers)


def _padded(tensor, size):
    """The batch, with its first example again at the end as often as is needed for that size.

    No tower is empty then: a mean over nothing, NaN, would stay in batch norm's statistics.
    """
    if tensor is None or size is None:
        return tensor
    missing = size - _batch_size(tensor)
    if isinstance(tensor, tf.SparseTensor):
        return _padded_sparse(tensor, missing)
    repeated = tf.tile(tensor[:1], tf.concat(
        [[missing], tf.ones([tf.rank(tensor) - 1], tf.int32)], 0))
    padded = tf.concat([tensor, repeated], 0)
    padded.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:])
                     if not isinstance(missing, int) else padded.shape)
    return padded


def _padded_sparse(tensor, missing):
    """As `_padded`: `missing` more rows, with what the first row holds."""
    first = tf.boolean_mask(tf.range(tf.shape(tensor.values)[0]),
                            tf.equal(tensor.indices[:, 0], 0))
    size, missing = tensor.dense_shape[0], tf.cast(missing, tf.int64)
    rows = tf.range(missing) + size
    per_row = tf.shape(first)[0]
    repeated = tf.tile(tf.gather(tensor.indices, first), [tf.cast(missing, tf.int32), 1])
    new_rows = tf.reshape(tf.tile(rows[:, None], [1, per_row]), [-1, 1])
    return tf.SparseTensor(
        tf.concat([tensor.indices, tf.concat([new_rows, repeated[:, 1:]], 1)], 0),
        tf.concat([tensor.values, tf.tile(tf.gather(tensor.values, first),
                                          [tf.cast(missing, tf.int32)])], 0),
        tf.concat([tensor.dense_shape[:1] + missing, tensor.dense_shape[1:]], 0))


def _with_batch_dimension(output, rows):
    """A scalar as [rows, 1], the same for each example, so that its mean over them is weighted."""
    if isinstance(output, tf.Tensor) and output.shape.ndims == 0:
        return tf.fill([rows, 1], output)
    return output


def _unpadded(output, count, padded):
    """The output without the rows of repeated examples, which are the last ones."""
    if output is None or padded is None or not isinstance(output, tf.Tensor):
        return output
    rows = tf.shape(output)[0]
    # An example may have several rows.
    kept = output[:rows * count // padded]
    kept.set_shape(tf.TensorShape([None]).concatenate(output.shape[1:]))
    return kept


def _weights(towers, count):
    """Each tower's share of the batch, without repeated examples."""
    if len(towers) == 1:
        return [1.]
    return [tf.cast(tower.size * tf.cast(tower.index < count, tf.int32), tf.float64)
            / tf.cast(count, tf.float64) for tower in towers]


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
