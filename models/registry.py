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
import numbers

import tensorflow.compat.v1 as tf
import tf_slim as slim
from tf_slim.nets import alexnet, inception, overfeat, resnet_v1, resnet_v2, vgg

from models.digits import digits, digits_arg_scope
from models.inception_resnet_v2 import inception_resnet_v2, inception_resnet_v2_arg_scope
from towers.errors import InvalidArgumentError

# Arguments of the networks' functions that `build` decides itself: they would change the shape of
# what it returns, or it has a parameter for them.
_TAKEN = ('inputs', 'num_classes', 'is_training', 'spatial_squeeze', 'global_pool')


class UnknownNetworkError(InvalidArgumentError):
    """A name that no network has."""


class Network(collections.namedtuple('Network', [
        'name', 'fn', 'arg_scope', 'default_image_size', 'default_channels', 'image_sizes',
        'image_sizes_without_aux', 'notes', 'keeps_images'])):
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
        notes: what else there is to know, in a sentence; may be empty.
        keeps_images: whether it is made for images as the data set has them, whose size and
            channels it takes in place of its defaults.
    """

    __slots__ = ()

    @property
    def options(self):
        """Names of the further arguments that `build` passes on to `fn`, such as 'scope'."""
        return [name for name in inspect.signature(self.fn).parameters if name not in _TAKEN]

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
            batch_norm_decay: of batch norm's moving averages, at least 0 and below 1; None for
                the arg_scope's default: 0.9997 for the inceptions, which takes some 10,000 steps
                to forget the initial values.
            **options: passed on to `fn`: those in `self.options`, such as `dropout_keep_prob=1.0`
                or `create_aux_logits=False`.

        Returns:
            (logits, end_points): logits [batch, num_classes], of the images' type, and a dict of
            the network's end points by name, the same names in whatever scope it is built. These
            always include 'Logits' (the same tensor) and 'Predictions' (the softmax), and
            'AuxLogits' [batch, num_classes] where there are any.

        Raises:
            InvalidArgumentError: an argument makes no sense, or the images' size is not for this
                network. Nothing has been added to the graph by then.
        """
        self._check_options(options)
        self._check_images(images, options.get('create_aux_logits', True))
        if (not isinstance(num_classes, numbers.Integral) or isinstance(num_classes, bool)
                or num_classes < 1):
            raise InvalidArgumentError(
                'Got num_classes=%r for the network %s, expected a whole number of at least 1. '
                'For features without logits call its fn.' % (num_classes, self.name))
        arg_scope = self.arg_scope(**self._scope_arguments(weight_decay, batch_norm_decay))

        earlier = {op.name for op in images.graph.get_operations()}
        with slim.arg_scope(arg_scope):
            logits, end_points = self.fn(images, num_classes, is_training=is_training, **options)
        end_points = _own_end_points(end_points, earlier)
        if logits.get_shape().ndims == 4:
            logits = tf.squeeze(logits, [1, 2], name='Logits')
        end_points['Logits'] = logits
        if 'Predictions' not in end_points:
            end_points['Predictions'] = tf.nn.softmax(logits, name='Predictions')
        return logits, end_points

    def _scope_arguments(self, weight_decay, batch_norm_decay):
        arguments = {}
        if weight_decay is not None:
            if not isinstance(weight_decay, numbers.Real) or not 0 <= weight_decay < float('inf'):
                raise InvalidArgumentError(
                    'Got weight_decay=%r, expected a number of at least 0, or None for the default '
                    'of the network %s.' % (weight_decay, self.name))
            arguments['weight_decay'] = float(weight_decay)  # slim refuses a whole number, 0 too
        if batch_norm_decay is not None:
            if 'batch_norm_decay' not in inspect.signature(self.arg_scope).parameters:
                raise InvalidArgumentError(
                    'Got batch_norm_decay=%r, and the arg_scope of the network %s takes none: '
                    'leave it out.'
                    % (batch_norm_decay, self.name))
            if not isinstance(batch_norm_decay, numbers.Real) or not 0 <= batch_norm_decay < 1:
                raise InvalidArgumentError(
                    'Got batch_norm_decay=%r, expected a number of at least 0 and below 1, or None '
                    'for the default of the network %s.' % (batch_norm_decay, self.name))
            arguments['batch_norm_decay'] = float(batch_norm_decay)
        return arguments

    def _check_options(self, options):
        for option in sorted(options):
            if option not in self.options:
                raise InvalidArgumentError(
                    'The network %s has no option %r. It has: %s.'
                    % (self.name, option, ', '.join(self.options)))

    def _check_images(self, images, has_aux):
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


def network_names():
    """The names of all networks, a sorted list."""
    return sorted(_NETWORKS)


def get_network(name):
    """The `Network` of that name.

    Raises:
        UnknownNetworkError: there is none. The text asks whether the nearest was meant, and lists
            those there are.
    """
    if name in network_names():
        return _NETWORKS[name]
    likeness = {other: difflib.SequenceMatcher(None, str(name).lower(), other).ratio()
                for other in network_names()}
    most = max(likeness.values())
    nearest = [other for other in network_names() if likeness[other] == most]
    question = ' Did you mean %s?' % ' or '.join(nearest) if most > 0.5 else ''
    raise UnknownNetworkError('There is no network %r.%s Those there are: %s.'
                              % (name, question, ', '.join(network_names())))


def _own_end_points(end_points, earlier_ops):
    """The end points of the call just made, without the scopes it was made in.

    slim's older networks collect their end points in a graph collection, under names of which some
    begin with the variable scope and some with the name scope; overfeat's collection holds those
    of every earlier call too. As they are, two calls have different names.
    """
    outer = [tf.get_default_graph().get_name_scope(), tf.get_variable_scope().name]
    prefixes = sorted((scope + '/' for scope in outer if scope), key=len, reverse=True)
    own = {}
    for name, tensor in end_points.items():
        if tensor.op.name not in earlier_ops:
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), '')
            own[name[len(prefix):]] = tensor
    return own


_FIXED_SIZE = 'Its fully connected layers take one size of feature map.'
_AUX = ('Has auxiliary logits, for a second loss; the window of their last convolution, hence the '
        'shape of its weights, depends on the image size.')
_V1_RESNET = 'Batch norm after the convolutions, relu after the sum.'
_V2_RESNET = 'Batch norm and relu before the convolutions.'


def _networks():
    """Yields every Network.

    The limits of the image size are those of the networks' layers: what is left of the image must
    fill the window of the last one, and logits of more than one place could not be squeezed.
    """
    def network(fn, arg_scope, size, sizes=(1, None), sizes_without_aux=None, notes='',
                channels=3, keeps_images=False):
        return Network(fn.__name__, fn, arg_scope, size, channels, sizes, sizes_without_aux, notes,
                       keeps_images)

    yield network(digits, digits_arg_scope, digits.default_image_size, (4, None),
                  notes='Small, for small images.', channels=1, keeps_images=True)
    yield network(inception_resnet_v2, inception_resnet_v2_arg_scope,
                  inception_resnet_v2.default_image_size, (107, None), (75, None), notes=_AUX)
    yield network(inception.inception_v1, inception.inception_v1_arg_scope, 224, (193, 224),
                  notes='Its last pooling window is 7 x 7.')
    yield network(inception.inception_v2, inception.inception_v2_arg_scope, 224, (1, 256))
    yield network(inception.inception_v3, inception.inception_v3_arg_scope, 299, (107, 346),
                  (75, 362), notes=_AUX[:-1] + ', and their names too.')
    yield network(alexnet.alexnet_v2, alexnet.alexnet_v2_arg_scope, 224, (195, 226),
                  notes=_FIXED_SIZE)
    yield network(overfeat.overfeat, overfeat.overfeat_arg_scope, 231, (231, 262),
                  notes=_FIXED_SIZE)
    for fn in (vgg.vgg_a, vgg.vgg_16, vgg.vgg_19):
        yield network(fn, vgg.vgg_arg_scope, 224, (224, 255), notes=_FIXED_SIZE)
    for module, notes in ((resnet_v1, _V1_RESNET), (resnet_v2, _V2_RESNET)):
        for depth in (50, 101, 152, 200):
            fn = getattr(module, '%s_%d' % (module.__name__.split('.')[-1], depth))
            yield network(fn, module.resnet_arg_scope, 224, notes=notes)


_NETWORKS = {network.name: network for network in _networks()}
