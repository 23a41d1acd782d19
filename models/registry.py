"""Image classifiers by name, all built by one call.

    network = registry.get_network('resnet_v1_50')
    logits, end_points = network.build(images, num_classes=10, is_training=True)

The networks are this package's own and those of `tf_slim.nets`, each under the name of its
function there. What differs between them is evened out: the arg_scope is entered, logits are
[batch, num_classes] (slim's resnets leave them [batch, 1, 1, num_classes]), 'Logits' and
'Predictions' are among the end points, and an image size that a network cannot take is an error
before any op is made. On TF 2.13 and later call `towers.mend_slim()` first.
"""

import collections
import difflib
import inspect

import tensorflow.compat.v1 as tf
import tf_slim as slim
from tf_slim.nets import alexnet, inception, overfeat, resnet_v1, resnet_v2, vgg

from models.digits import digits, digits_arg_scope
from models.inception_resnet_v2 import inception_resnet_v2, inception_resnet_v2_arg_scope
from towers.arguments import check_count, check_number
from towers.errors import InvalidArgumentError


class Network(collections.namedtuple('Network', [
        'name', 'fn', 'arg_scope', 'default_image_size', 'default_channels', 'image_sizes',
        'image_sizes_without_aux', 'keeps_images'])):
    """A network that `get_network` found.

    Fields:
        name: such as 'inception_v3'.
        fn: the function that adds it to the graph, as slim's networks are called.
        arg_scope: the function that makes the arg_scope to call `fn` in; takes `weight_decay`.
        default_image_size: height and width, in pixels, that it was made for.
        default_channels: the channels that it was made for; it takes any number.
        image_sizes: (least, most) height and width that `build` takes; most is None without limit.
        image_sizes_without_aux: the same with `create_aux_logits=False`, where there are auxiliary
            logits, else None.
        keeps_images: whether it is made for images as the data set has them, whose size and
            channels it takes in place of its defaults.
    """

    __slots__ = ()

    @property
    def options(self):
        """Names of the arguments of `fn`."""
        return list(inspect.signature(self.fn).parameters)

    def build(self, images, num_classes, is_training=True, weight_decay=None,
              batch_norm_decay=None, **options):
        """Adds the network to the graph, inside its arg_scope.

        Args:
            images: float tensor [batch, height, width, channels]; the batch may be unknown, and
                height and width where any size will do.
            num_classes: how many logits, at least 1. (Published ImageNet checkpoints of the
                inceptions have 1001, with the background class; the others 1000.)
            is_training: bool, or a bool scalar tensor: batch norm by the batch's statistics,
                dropout.
            weight_decay: factor of the L2 loss; None for the arg_scope's default, 0 for none.
            batch_norm_decay: decay of batch norm's moving averages, at least 0 and below 1; None
                for the arg_scope's default: 0.9997 for the inceptions, which takes some 10,000
                steps to forget the initial values.
            **options: passed on to `fn`, such as `dropout_keep_prob=1.0` or
                `create_aux_logits=False`.

        Returns:
            (logits, end_points): logits [batch, num_classes], of the images' type, and a dict of
            the network's end points by name, which always include 'Logits' (the same tensor) and
            'Predictions' (the softmax), and 'AuxLogits' [batch, num_classes] where there are any.

        Raises:
            InvalidArgumentError: an argument makes no sense, or the images' size is not for this
                network. Nothing has been added to the graph by then.
        """
        self._check_images(images, options.get('create_aux_logits', True))
        check_count('num_classes', num_classes)
        with slim.arg_scope(self.arg_scope(**self._scope_arguments(
                weight_decay, batch_norm_decay))):
            logits, end_points = self.fn(images, num_classes, is_training=is_training, **options)
        if logits.get_shape().ndims == 4:
            logits = tf.squeeze(logits, [1, 2], name='Logits')
        end_points['Logits'] = logits
        if 'Predictions' not in end_points:
            end_points['Predictions'] = tf.nn.softmax(logits, name='Predictions')
        return logits, end_points

    def _scope_arguments(self, weight_decay, batch_norm_decay):
        """The arguments of the network's `arg_scope`, a dict; raises `InvalidArgumentError`."""
        arguments = {}
        if weight_decay is not None:
            check_number('weight_decay', weight_decay, least=0, most=1e30,
                         expected='a number of at least 0')
            arguments['weight_decay'] = float(weight_decay)  # slim refuses a whole number, 0 too
        if batch_norm_decay is not None:
            if 'batch_norm_decay' not in inspect.signature(self.arg_scope).parameters:
                raise InvalidArgumentError(
                    'Got batch_norm_decay=%r, and the arg_scope of the network %s takes none: '
                    'leave it out.' % (batch_norm_decay, self.name))
            check_number('batch_norm_decay', batch_norm_decay, least=0, most=1 - 1e-9,
                         expected='a number of at least 0 and below 1')
            arguments['batch_norm_decay'] = float(batch_norm_decay)
        return arguments

    def _check_images(self, images, has_aux):
        """Raises `InvalidArgumentError` for images that the network does not take."""
        if not tf.is_tensor(images) or not images.dtype.is_floating:
            raise InvalidArgumentError(
                'The network %s needs a tensor of floating-point images, not %s. Convert them '
                'with tf.image.convert_image_dtype(images, tf.float32).' % (self.name, images))
        if images.get_shape().ndims != 4 or images.get_shape().as_list()[3] is None:
            raise InvalidArgumentError(
                'The network %s needs images of shape [batch, height, width, channels] with a '
                'known number of channels, not %s.' % (self.name, images.get_shape()))
        least, most = self.image_sizes
        if not has_aux and self.image_sizes_without_aux:
            least, most = self.image_sizes_without_aux
        if (least, most) == (1, None):
            return
        for name, side in zip(('height', 'width'), images.get_shape().as_list()[1:3]):
            if side is None:
                raise InvalidArgumentError(
                    'The network %s needs images whose height and width are known, and the %s of '
                    '%s is not: resize them, or call set_shape where they have one size.' % (
                        self.name, name, images.get_shape()))
            if side < least or (most is not None and side > most):
                raise InvalidArgumentError(
                    'The network %s needs images whose height and width are %s pixels, not %s; '
                    'its default is %d x %d.'
                    % (self.name,
                       'at least %d' % least if most is None else '%d to %d' % (least, most),
                       images.get_shape(), self.default_image_size, self.default_image_size))


def get_network(name):
    """The `Network` of that name.

    Raises:
        InvalidArgumentError: there is none. The text asks whether the nearest was meant, and lists
            those there are.
    """
    if name in _NETWORKS:
        return _NETWORKS[name]
    likeness = {other: difflib.SequenceMatcher(None, str(name).lower(), other).ratio()
                for other in sorted(_NETWORKS)}
    most = max(likeness.values())
    nearest = [other for other in likeness if likeness[other] == most]
    question = ' Did you mean %s?' % ' or '.join(nearest) if most > 0.5 else ''
    raise InvalidArgumentError('There is no network %r.%s Those there are: %s.'
                               % (name, question, ', '.join(likeness)))


def _networks():
    """Yields every Network.

    The limits of the image size are those of the networks' layers: what is left of the image must
    fill the window of the last one, and logits of more than one place could not be squeezed.
    """
    def network(fn, arg_scope, size, sizes=(1, None), sizes_without_aux=None, channels=3,
                keeps_images=False):
        return Network(fn.__name__, fn, arg_scope, size, channels, sizes, sizes_without_aux,
                       keeps_images)

    yield network(digits, digits_arg_scope, digits.default_image_size, (4, None), channels=1,
                  keeps_images=True)
    yield network(inception_resnet_v2, inception_resnet_v2_arg_scope,
                  inception_resnet_v2.default_image_size, (107, None), (75, None))
    yield network(inception.inception_v1, inception.inception_v1_arg_scope, 224, (193, 224))
    yield network(inception.inception_v2, inception.inception_v2_arg_scope, 224, (1, 256))
    yield network(inception.inception_v3, inception.inception_v3_arg_scope, 299, (107, 346),
                  (75, 362))
    yield network(alexnet.alexnet_v2, alexnet.alexnet_v2_arg_scope, 224, (195, 226))
    yield network(overfeat.overfeat, overfeat.overfeat_arg_scope, 231, (231, 262))
    for fn in (vgg.vgg_a, vgg.vgg_16, vgg.vgg_19):
        yield network(fn, vgg.vgg_arg_scope, 224, (224, 255))
    for module in (resnet_v1, resnet_v2):
        for depth in (50, 101, 152, 200):
            yield network(getattr(module, '%s_%d' % (module.__name__.split('.')[-1], depth)),
                          module.resnet_arg_scope, 224)


_NETWORKS = {network.name: network for network in _networks()}

NAMES = tuple(_NETWORKS)
"""The names of all networks."""
