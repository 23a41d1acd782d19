"""A network's loss, metrics and predictions, of a network that can be counted by hand."""

import math

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import registry
from models.classifier import Classifier
from towers import InvalidArgumentError


class Network:
    """Two classes: their logits are equal; those for a second loss favour class 0."""
    default_image_size, default_channels, options = 4, 1, ('create_aux_logits',)
    keeps_images = False

    def __init__(self):
        self.asked = []

    def build(self, images, num_classes, is_training, **options):
        self.asked.append(dict(options, is_training=is_training))
        rows = tf.shape(images)[0]
        return tf.zeros([rows, num_classes]), {
            'AuxLogits': tf.tile([[math.log(3.), 0.]], [rows, 1])}


@pytest.mark.parametrize('mode, loss', [
    ('train', math.log(2.) + .5 * math.log(4.)), ('eval', math.log(2.))])
def test_the_second_loss_is_for_training_alone(mode, loss):
    network = Network()
    output = Classifier(network, 2, aux_loss_weight=.5).model_fn(mode)(
        tf.zeros([3, 4, 4, 1]), tf.constant([1, 1, 1], tf.int64))
    with tf.Session() as session:
        assert session.run(output.loss) == pytest.approx(loss, rel=1e-6)
        assert session.run(output.metrics['accuracy']) == 0.
    assert network.asked == [
        {'weight_decay': None, 'batch_norm_decay': None, 'is_training': mode == 'train'}]
    Classifier(network, 2).model_fn(mode)(tf.zeros([3, 4, 4, 1]),
                                          tf.constant([1, 1, 1], tf.int64))
    assert network.asked[1]['create_aux_logits'] is False


class Ranks:
    """Logits 0, -1, -2, … of the classes 0, 1, 2, …."""
    default_image_size, default_channels, options, keeps_images = 4, 1, (), False

    def build(self, images, num_classes, is_training, **options):
        return tf.tile(-tf.range(num_classes, dtype=tf.float32)[None], [tf.shape(images)[0], 1]), {}


def test_top_5_accuracy_label_smoothing_and_all_probabilities():
    labels, images = np.array([0, 3, 4, 5, 11]), tf.zeros([5, 4, 4, 1])
    classifier = Classifier(Ranks(), 12, label_smoothing=.1, all_probabilities=True)
    trained, evaluated = [classifier.model_fn(mode)(images, tf.constant(labels, tf.int64))
                          for mode in ('train', 'eval')]
    probabilities = np.exp(-np.arange(12.)) / np.exp(-np.arange(12.)).sum()
    smoothed = .9 * np.eye(12)[labels] + .1 / 12
    with tf.Session() as session:
        metrics = session.run(evaluated.metrics)
        assert metrics == {'accuracy': pytest.approx(.2), 'top_5_accuracy': pytest.approx(.6)}
        assert session.run(trained.loss) == pytest.approx(
            -(smoothed * np.log(probabilities)).sum(1).mean(), rel=1e-6)
        assert session.run(evaluated.loss) == pytest.approx(
            -np.log(probabilities)[labels].mean(), rel=1e-6)
        found = session.run(evaluated.predictions)['probabilities']
        np.testing.assert_allclose(found, np.tile(probabilities, [5, 1]), rtol=1e-5)
    assert set(Classifier(Network(), 2).model_fn('eval')(
        images, tf.constant([1] * 5, tf.int64)).metrics) == {'accuracy'}


@pytest.mark.parametrize('name, image_size, image_shape, size, channels', [
    ('digits', None, (8, 8, 1), 8, 1), ('digits', None, (28, 28, 1), 28, 1),
    ('digits', None, (32, 32, 3), 32, 3), ('digits', 16, (32, 32, 3), 16, 3),
    ('digits', 16, (None, None, 3), 16, 3), ('digits', None, (None, None, None), 8, 1),
    ('resnet_v1_50', None, (8, 8, 1), 224, 3), ('inception_v3', 107, (None, None, 3), 107, 3)])
def test_a_network_for_small_images_takes_them_as_they_are(name, image_size, image_shape, size,
                                                           channels):
    classifier = Classifier(registry.get_network(name), 2, image_size, image_shape=image_shape)
    assert classifier.image_format == {'image_size': size, 'channels': channels}


@pytest.mark.parametrize('image_shape', [(None, None, 3), (20, 30, 1)])
def test_images_without_one_size_need_one(image_shape):
    with pytest.raises(InvalidArgumentError, match='--image_size=32.*--model=inception_v3'):
        Classifier(registry.get_network('digits'), 2, image_shape=image_shape)
