"""models.registry: every network is found, built and checked alike."""

import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

from models import registry
from models.digits import digits, digits_arg_scope
from sample_networks import FULL, fewer_blocks
from towers.errors import InvalidArgumentError
from towers.slim_mend import mend_slim

mend_slim()

NAMES = ['alexnet_v2', 'digits', 'inception_resnet_v2', 'inception_v1', 'inception_v2',
         'inception_v3', 'overfeat', 'resnet_v1_101', 'resnet_v1_152', 'resnet_v1_200',
         'resnet_v1_50', 'resnet_v2_101', 'resnet_v2_152', 'resnet_v2_200', 'resnet_v2_50',
         'vgg_16', 'vgg_19', 'vgg_a']
LIMITED = [name for name in NAMES if registry.get_network(name).image_sizes != (1, None)]


def placeholder(network, side=None, batch=None):
    side = side or network.default_image_size
    return tf.placeholder(tf.float32, [batch, side, side, network.default_channels])


def test_names():
    for name in NAMES:
        assert registry.get_network(name).name == name


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    'alexnet_v2', 'digits', 'inception_resnet_v2', 'inception_v3', 'overfeat', 'resnet_v1_50',
    'resnet_v2_200', 'vgg_a'])
def test_builds_at_its_default_size(name, monkeypatch):
    asked = fewer_blocks(monkeypatch, 1)
    network = registry.get_network(name)
    logits, end_points = network.build(placeholder(network), 7, is_training=True)
    assert asked == FULL.get(name, [])
    assert logits.get_shape().as_list() == [None, 7]
    assert end_points['Logits'] is logits
    assert end_points['Predictions'].get_shape().ndims == 2
    has_aux = network.image_sizes_without_aux is not None
    assert ('AuxLogits' in end_points) == has_aux
    if has_aux:
        assert end_points['AuxLogits'].get_shape().as_list() == [None, 7]
    assert tf.losses.get_regularization_losses()


# ---- image sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize('name', LIMITED)
def test_image_size_out_of_range(graph, name):
    network = registry.get_network(name)
    least, most = network.image_sizes
    sides = [least - 1] * (least > 1) + ([most + 1] if most else []) + [None]
    for side in sides:
        images = tf.placeholder(tf.float32, [2, network.default_image_size, side, 3])
        made = len(graph.get_operations())
        with pytest.raises(InvalidArgumentError, match='%s needs images whose height' % name):
            network.build(images, 7)
        assert len(graph.get_operations()) == made


@pytest.mark.parametrize('name', ['digits', pytest.param('alexnet_v2', marks=pytest.mark.slow)])
def test_image_sizes_are_the_true_limits(name):
    """What `build` takes works, and slim's function fails just outside."""
    network = registry.get_network(name)
    least, most = network.image_sizes
    for side in (least, most) if most else (least,):
        with tf.Graph().as_default():
            network.build(placeholder(network, side), 7)
    for side in (least - 1, most + 1) if most else (least - 1,):
        with tf.Graph().as_default(), slim.arg_scope(network.arg_scope()):
            with pytest.raises(ValueError):
                network.fn(placeholder(network, side), 7)


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_decays_of_weights_and_of_batch_norm():
    network = registry.get_network('digits')

    def found(**arguments):
        """The L2 loss of weights of 1, and how far an update of zeros moves a variance from 1."""
        with tf.Graph().as_default(), tf.Session() as session:
            network.build(tf.zeros([2, 8, 8, 1]), 10, **arguments)
            session.run(tf.global_variables_initializer())
            session.run(tf.get_collection(tf.GraphKeys.UPDATE_OPS))
            for variable in tf.trainable_variables():
                session.run(variable.assign(tf.ones_like(variable)))
            variance, = tf.global_variables('Digits/conv1/BatchNorm/moving_variance')
            losses = tf.losses.get_regularization_losses()
            return session.run([tf.add_n(losses) if losses else tf.zeros([]), 1 - variance[0]])

    loss, moved = found()
    assert moved == pytest.approx(0.1, abs=1e-6)
    assert found(weight_decay=0) == [0, moved]
    assert found(weight_decay=1, batch_norm_decay=0.75) == [
        pytest.approx(2000 * loss, rel=1e-5), pytest.approx(0.25, abs=1e-6)]


@pytest.mark.parametrize('arguments, text', [
    ({'num_classes': 0}, 'num_classes=0'),
    ({'weight_decay': float('nan')}, 'weight_decay=nan'),
    ({'batch_norm_decay': 1}, 'batch_norm_decay=1'),
    ({'images': tf.int32}, 'convert_image_dtype'),
    ({'images': [1, 8, 8]}, 'needs images of shape'),
    ({'images': [1, 8, 8, None]}, 'known number of channels'),
    ({'images': [1, 8, None, 1]}, 'whose height and width are known, and the width of (1, 8, ')])
def test_bad_arguments(graph, arguments, text):
    images = arguments.pop('images', [1, 8, 8, 1]) if 'images' in arguments else [1, 8, 8, 1]
    images = (tf.placeholder(tf.float32, images) if isinstance(images, list)
              else tf.placeholder(images, [1, 8, 8, 1]))
    arguments = dict({'num_classes': 10}, **arguments)
    with pytest.raises(InvalidArgumentError) as caught:
        registry.get_network('digits').build(images, **arguments)
    assert text in str(caught.value)
    assert '\n' not in str(caught.value)
    assert len(graph.get_operations()) == 1


@pytest.mark.parametrize('name, nearest', [
    ('Inception_Resnet_V2', 'inception_resnet_v2'), ('resnet50', 'resnet_v1_50 or resnet_v2_50'),
    ('qqq', None)])
def test_nearest_name(name, nearest):
    with pytest.raises(InvalidArgumentError) as caught:
        registry.get_network(name)
    assert ('Did you mean' in str(caught.value)) == bool(nearest)
    if nearest:
        assert 'Did you mean %s?' % nearest in str(caught.value)
    assert str(caught.value).endswith(' Those there are: %s.' % ', '.join(NAMES))


# ---- models.digits -------------------------------------------------------------------------------

def build(is_training=True, reuse=None):
    images = tf.placeholder(tf.float32, [None, 8, 8, 1])
    with slim.arg_scope(digits_arg_scope()):
        return digits(images, is_training=is_training, reuse=reuse)



@pytest.mark.slow
def test_updates_and_dropout_belong_to_training(graph):
    build(is_training=True)
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 6
    randoms = [op for op in graph.get_operations() if op.type == 'RandomUniform'
               and '/dropout/' in op.name]
    assert len(randoms) == 1
    before = len(tf.global_variables()), len(tf.losses.get_regularization_losses())
    build(is_training=False, reuse=True)
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 6
    assert randoms == [op for op in graph.get_operations() if op.type == 'RandomUniform'
                       and '/dropout/' in op.name]
    assert before == (len(tf.global_variables()), len(tf.losses.get_regularization_losses()))
