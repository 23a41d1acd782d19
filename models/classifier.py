"""A network that learns to tell classes apart: its loss, its metrics, and its serving signature."""

import typing

import tensorflow.compat.v1 as tf

import towers


class Classifier:
    """A network of `models.registry`, with the model functions to train and evaluate it.

    Attributes:
      image_format: dict with `image_size` (pixels) and `channels`, arguments of a data set's
        batches.
      regularization: the argument of `build_towers` with which this model is built.
      unit: the name of an example.
    """

    regularization = 'add'
    unit = 'image'

    def __init__(self, network, num_classes, image_size=None, weight_decay=None, aux_loss_weight=0.,
                 batch_norm_decay=None, image_shape=(None, None, None), label_smoothing=0.,
                 all_probabilities=False):
        """
        Args:
          network: `registry.Network`.
          num_classes: the number of classes.
          image_size: height and width in pixels; None for what the network asks for, or the size
            of the data set's images for a network that takes any size.
          weight_decay: factor of the L2 loss of the weights.
          aux_loss_weight: factor of the loss of auxiliary logits, of networks that have them; 0
            builds none.
          batch_norm_decay: decay of batch norm's moving averages; None for what the network asks
            for.
          image_shape: (height, width, channels) of the data set's images; each None where the
            images differ, or where the data set can give any.
          label_smoothing: part of a training label that is spread evenly over all classes (Szegedy
            et al. 2016).
          all_probabilities: whether predictions have the probabilities of all classes.

        Raises:
          InvalidArgumentError: the images differ in size, the network takes any, and `image_size`
            is None.
        """
        self.image_format = _image_format(network, image_size, image_shape)
        self._network = network
        self._num_classes = num_classes
        self._aux_loss_weight = aux_loss_weight
        self._label_smoothing = label_smoothing
        self._all_probabilities = all_probabilities
        self._options = {'weight_decay': weight_decay, 'batch_norm_decay': batch_norm_decay}
        if not aux_loss_weight and 'create_aux_logits' in network.options:
            self._options['create_aux_logits'] = False

    def model_fn(self, mode: str) -> typing.Callable:
        """The model function of a mode, 'train', 'eval' or 'infer': a function of the images and
        labels of a shard."""
        def model_fn(images, labels):
            logits, end_points = self._build(images, mode == 'train')
            smoothing = self._label_smoothing if mode == 'train' else 0.
            loss = cross_entropy(labels, logits, smoothing)
            if mode == 'train' and end_points.get('AuxLogits') is not None:
                loss += self._aux_loss_weight * cross_entropy(
                    labels, end_points['AuxLogits'], smoothing)
            predicted = tf.argmax(logits, 1)
            probabilities = tf.nn.softmax(logits)
            hits = {'accuracy': tf.equal(predicted, labels)}
            if self._num_classes > 10:
                hits['top_5_accuracy'] = tf.nn.in_top_k(
                    predictions=tf.cast(logits, tf.float32), targets=labels, k=5)
            predictions = {'label': labels, 'predicted': predicted,
                           'probability': tf.reduce_max(probabilities, 1)}
            if self._all_probabilities:
                predictions['probabilities'] = probabilities
            metrics = {name: tf.reduce_mean(tf.cast(hit, tf.float64))
                       for name, hit in hits.items()}
            return towers.ModelOutput(loss, predictions=predictions, metrics=metrics)
        return model_fn

    def serving(self) -> typing.Tuple[dict, dict]:
        """Builds the model for a SavedModel: `(inputs, outputs)`, dicts of tensors."""
        size = self.image_format['image_size']
        channels = self.image_format['channels']
        images = tf.placeholder(tf.float32, [None, size, size, channels], 'images')
        logits, _ = self._build(images, is_training=False)
        return {'images': images}, {'logits': logits, 'probabilities': tf.nn.softmax(logits),
                                    'classes': tf.argmax(logits, 1)}

    def _build(self, images, is_training):
        """Builds the network; returns its logits and end points."""
        return self._network.build(images, self._num_classes, is_training=is_training,
                                   **self._options)


def cross_entropy(labels: tf.Tensor, logits: tf.Tensor, smoothing: float = 0.) -> tf.Tensor:
    """Mean softmax cross-entropy of a shard: [shard] and [shard, classes] to a scalar.

    With smoothing s of c classes, a label is 1 - s + s / c for its class, and s / c for the others.
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * tf.reduce_mean(
            tf.nn.log_softmax(logits), 1)
    return tf.reduce_mean(losses)


def _image_format(network, image_size, image_shape):
    """The size and the channels of the images that the network gets: `Classifier.image_format`."""
    size = network.default_image_size
    channels = network.default_channels
    height, width, own_channels = image_shape
    if network.keeps_images and own_channels is not None:
        channels = own_channels
        if not image_size and (height is None or height != width):
            raise towers.InvalidArgumentError(
                'The images of this data set have no one size, and the network %s takes any: give '
                '--image_size=32, or another, or choose a network for photographs, such as '
                '--model=inception_v3.' % network.name)
        size = height
    return {'image_size': image_size or size, 'channels': channels}
