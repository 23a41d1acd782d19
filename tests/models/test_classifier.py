"""A network's loss, metrics and predictions, of a network that can be counted by hand."""

import math

import pytest
import tensorflow.compat.v1 as tf

from models.classifier import Classifier


class Network:
    """Two classes: their logits are equal; those for a second loss favour class 0."""
    default_image_size, default_channels, options = 4, 1, ('create_aux_logits',)

    def __init__(self):
        self.asked = []

    def build(self, images, num_classes, is_training, **options):
        self.asked.append(dict(options, is_training=is_training))
        rows = tf.shape(images)[0]
        return tf.zeros([rows, num_classes]), {
            'AuxLogits': tf.tile([[math.log(3.), 0.]], [rows, 1])}


@pytest.mark.parametrize('is_training, loss', [
    (True, math.log(2.) + .5 * math.log(4.)), (False, math.log(2.))])
def test_the_second_loss_is_for_training_alone(is_training, loss):
    network = Network()
    output = Classifier(network, 2, aux_loss_weight=.5).model_fn(is_training)(
        tf.zeros([3, 4, 4, 1]), tf.constant([1, 1, 1], tf.int64))
    with tf.Session() as session:
        assert session.run(output.loss) == pytest.approx(loss, rel=1e-6)
        assert session.run(output.metrics['accuracy']) == 0.
    assert network.asked == [
        {'weight_decay': None, 'batch_norm_decay': None, 'is_training': is_training}]
    Classifier(network, 2).model_fn(is_training)(tf.zeros([3, 4, 4, 1]),
                                                 tf.constant([1, 1, 1], tf.int64))
    assert network.asked[1]['create_aux_logits'] is False
