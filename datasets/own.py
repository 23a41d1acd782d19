"""A data set of the user's own: `--dataset=module:function`.

    def reviews(data_dir):                       # reviews.py, in the folder of the run or installed
        return {'num_examples': {'train': 25000, 'test': 25000},
                'train_batches': train_batches, 'eval_batches': eval_batches}

`train_batches(batch_size, seed, first_example)` returns a `tf.data.Dataset` that does not end, of
batches `(features, labels)`, or of features alone: tensors [batch, …] in any structure, which a
model of the user's own takes. `eval_batches(batch_size)` returns one that ends. `first_example` is
a scalar int64 tensor: how many examples a run that resumes has seen. A pipeline that does not go by
it resumes with other examples than it would have had. With `--cluster` worker w of W takes every
Wth batch, from the wth on: all make them all, so that a pipeline has to give each machine the same.

With `'num_classes': 5` in the dict the data are images of that many classes, for a network by name.
Both functions have the arguments `image_size` and `channels` as well, and give `(images, labels)`:
images of float32, or of another floating-point type, which becomes that; labels of int64, the
numbers of classes. `image_size` is what --image_size says, or the network's own size, or None; the
network is made for the images as they come, which are of one size for training and testing.

What of it is not so is an error that names `--dataset=module:function`, before the run where that
can be known; a label out of range or a batch of another size, in the step that would have had it.
"""

import contextlib
import importlib
import inspect
import numbers
import os
import sys

import tensorflow.compat.v1 as tf

from datasets.epochs import checked_share
from datasets.errors import OwnDataError
from towers import compat
from towers.errors import InvalidArgumentError, TowersError

_FIELDS = ('num_examples', 'train_batches', 'eval_batches')
_OF_IMAGES = ('image_size', 'channels')
_ARGUMENTS = {'train_batches': ('batch_size', 'seed', 'image_size', 'channels', 'first_example'),
              'eval_batches': ('batch_size', 'image_size', 'channels')}


class Own:
    """What a user's function returned, as a data set.

    Attributes: as those of `ImageSet`; `num_classes` is None of what are no images of classes.
    """

    image_shape = (None, None, None)

    def __init__(self, name, fields):
        """
        Raises:
          InvalidArgumentError: a field is not what it has to be.
        """
        self.name = name
        self.num_classes = fields.get('num_classes')
        self._unit = 'examples' if self.num_classes is None else 'images'
        if self.num_classes is not None:
            if not _is_count(self.num_classes):
                raise InvalidArgumentError('%s says of num_classes %.80r: expected a whole number '
                                           'of at least 1.' % (name, self.num_classes))
            self.num_classes = int(self.num_classes)  # NumPy's would not do as a dimension
        self.num_examples = _checked_numbers(name, fields['num_examples'], self._unit)
        for field, arguments in _ARGUMENTS.items():
            arguments = self._taken(dict.fromkeys(arguments))
            if not takes(fields[field], **arguments):
                raise InvalidArgumentError(
                    '%s of %s is %.80r: expected a function that takes the arguments %s by '
                    'name.' % (
                        field, name, fields[field], ', '.join(arguments)))
        self._sizes = {}  # heights and widths that are known, by function
        self._train, self._eval = fields['train_batches'], fields['eval_batches']

    def _taken(self, arguments):
        """Those of the arguments, a dict, that the user's functions have."""
        return {name: value for name, value in arguments.items()
                if self.num_classes is not None or name not in _OF_IMAGES}

    def train_batches(self, batch_size, seed, image_size=None, channels=3, first_example=0,
                      shift=0, remainder='carry', share=(0, 1)):
        """The user's batches; of several workers, every Wth of them.

        Raises:
          InvalidArgumentError: `shift` or `remainder`, which are the user's function's own matter.
          OwnDataError: the user's function raised an error, or what it returned is no such data
            set.
        """
        if shift or remainder != 'carry':
            raise InvalidArgumentError(
                '--augment_shift and --remainder are for data sets of this program: %s makes its '
                'batches itself.' % self.name)
        with tf.device('/cpu:0'):
            worker, count = checked_share(share)
            with calling(self.name, 'train_batches'):
                batches = self._train(**self._taken(dict(
                    batch_size=batch_size, seed=seed, image_size=image_size, channels=channels,
                    first_example=tf.cast(first_example, tf.int64))))
            batches = self._checked('train_batches', batches, channels, batch_size)
            return batches if count == 1 else batches.shard(count, worker)

    def eval_batches(self, batch_size, image_size=None, channels=3):
        """The user's test batches; raises as `train_batches`."""
        with tf.device('/cpu:0'):
            with calling(self.name, 'eval_batches'):
                batches = self._eval(**self._taken(dict(
                    batch_size=batch_size, image_size=image_size, channels=channels)))
            return self._counted(self._checked('eval_batches', batches, channels))

    def _counted(self, batches):
        """The test batches, which fail where they are more than `num_examples` says: a pipeline
        whose end TensorFlow does not know would else be evaluated for ever."""
        said = self.num_examples['test']

        def count(before, batch):
            found = before + _rows(tf.nest.flatten(batch)[-1])
            check = _expected(found <= said, [
                'eval_batches of %s gives ' % self.name, found, ' %s or more, and its '
                'num_examples says %d for test: correct that, or end the pipeline by '
                '.take(%d)' % (self._unit, said, said)])
            with tf.control_dependencies([check]):
                return tf.identity(found), batch
        return batches.apply(tf.data.experimental.scan(tf.constant(0, tf.int64), count))

    def _checked(self, what, dataset, channels, batch_size=None):
        """The data set, whose batches fail where they are not what they have to be.

        Args:
          what: the name of the user's function.
          dataset: what it returned.
          channels: of the images.
          batch_size: that of every batch; None for any.
        """
        what = '%s of %s' % (what, self.name)
        if not isinstance(dataset, compat.DATASET_TYPES):
            raise OwnDataError('%s returned a %s: expected a tf.data.Dataset.' % (
                what, type(dataset).__name__))
        graph = tf.get_default_graph()
        if tf.data.experimental.to_variant(dataset).graph is not graph:
            raise OwnDataError('%s returned a tf.data.Dataset of another graph: expected one that '
                               'it makes each time it is called, without a tf.Graph() of its own.'
                               % what)
        if self.num_classes is None:
            return _checked_structure(what, dataset, batch_size)
        kinds = tf.data.get_output_classes(dataset)
        if kinds != (tf.Tensor, tf.Tensor):
            raise OwnDataError(
                '%s gives elements of the structure %s: expected (Tensor, Tensor), the images and '
                'the labels, both dense: end it with a .map() that returns these two.' % (
                    what, _kinds_text(kinds)))
        shapes = tf.data.get_output_shapes(dataset)
        if shapes[0].ndims not in (4, None) or shapes[1].ndims not in (1, None):
            raise OwnDataError(
                '%s gives elements of the shapes %s: expected (images [batch, height, width, '
                'channels], labels [batch]), a label the number of a class.' % (
                    what, compat.shapes_text(shapes)))
        types = tf.data.get_output_types(dataset)
        if not types[0].is_floating or types[1] != tf.int64:
            raise OwnDataError(
                '%s gives elements of the types %s and %s: expected float32 images and int64 '
                'labels: tf.cast them, and divide images of whole numbers by their white.' % (
                    what, types[0].name, types[1].name))
        if shapes[0].ndims is None or shapes[0].as_list()[3] is None:
            raise OwnDataError(
                '%s gives images of the shape %s, too little to make a network for: expected '
                '[batch, height, width, channels], from output_shapes of from_generator, or from '
                'set_shape in a map.' % (what, shapes[0]))
        of_images, height, width, found = shapes[0].as_list()
        if found != channels:
            raise OwnDataError('%s gives images of %d channels: expected the %d of its '
                               'argument channels.' % (what, found, channels))
        if None not in (height, width):
            self._sizes[what] = height, width
        for other, found in self._sizes.items():
            if what in self._sizes and found != (height, width):
                raise OwnDataError(
                    '%s gives images of %d x %d pixels, and %s of %d x %d: expected one size.' % (
                        what, height, width, other, found[0], found[1]))
        of_labels = None if shapes[1].ndims is None else shapes[1].as_list()[0]
        if None not in (of_images, of_labels) and of_images != of_labels:
            raise OwnDataError('%s gives batches of %d images and %d labels: expected one label '
                               'for each image.' % (what, of_images, of_labels))
        for size in (of_images, of_labels):
            _check_size(what, size, batch_size)
        return compat.map_batches(dataset, lambda images, labels: self._checked_batch(
            what, images, labels, batch_size))

    def _checked_batch(self, what, images, labels, batch_size):
        # The texts have no quotes: TensorFlow would put backslashes before them.
        flat = tf.reshape(labels, [-1])
        outside = tf.boolean_mask(flat, tf.logical_or(flat < 0, flat >= self.num_classes))
        checks = [_expected(tf.equal(tf.size(outside), 0), [
            '%s gives the label ' % what, tf.concat([outside, [0]], 0)[0],
            ': expected 0 to %d' % (self.num_classes - 1)])]
        if labels.shape.ndims is None:
            checks.append(_expected(tf.equal(tf.rank(labels), 1), [
                '%s gives labels of rank ' % what, tf.rank(labels),
                ': expected 1, the number of a class for each image']))
        with tf.control_dependencies(checks):
            counts = tf.shape(images)[0], tf.size(labels)
        checks.append(_expected(tf.equal(*counts), [
            '%s gives a batch of ' % what, counts[0], ' images and ', counts[1],
            ' labels: expected one label for each image']))
        if batch_size is None:
            checks.append(_expected(counts[0] > 0, [
                '%s gives a batch of 0 images: expected none without images' % what]))
        else:
            found = tf.shape(labels)[0]
            checks.append(_expected(tf.equal(found, batch_size), [
                '%s gives a batch of ' % what, found,
                ': expected the %d of its argument batch_size, from drop_remainder=True'
                % batch_size
                ]))
        with tf.control_dependencies(checks):
            images, labels = tf.identity(tf.cast(images, tf.float32)), tf.identity(labels)
        if batch_size is not None:
            for each in (images, labels):
                if each.shape.ndims is not None:
                    each.set_shape([batch_size] + each.shape.as_list()[1:])
        return images, labels


def _checked_structure(what, dataset, batch_size):
    """A data set of features of any structure, whose batches fail where they are not
    `batch_size` examples in every part; any number of examples if that is None."""
    shapes = tf.data.get_output_shapes(dataset)
    if type(shapes) is tuple and len(shapes) > 2:
        raise OwnDataError('%s gives elements of %d parts: expected (features, labels), or '
                           'features alone; put several into a dict.' % (what, len(shapes)))
    if any(shape.ndims == 0 for shape in tf.nest.flatten(shapes)):
        raise OwnDataError('%s gives elements of the shapes %s: expected batches, [batch, …] each, '
                           'from .batch(batch_size) or .padded_batch.' % (
                               what, compat.shapes_text(shapes)))
    for shape in tf.nest.flatten(shapes):
        _check_size(what, shape.as_list()[0] if shape.ndims else None, batch_size)

    def checked(*batch):
        batch = batch if len(batch) > 1 else batch[0]
        leaves = tf.nest.flatten(batch)
        counts = [_rows(leaf) for leaf in leaves]
        wanted = counts[0] if batch_size is None else tf.constant(batch_size, tf.int64)
        checks = [_expected(tf.equal(count, wanted), [
            '%s gives a batch of ' % what, count, ' examples in one part: expected ', wanted,
            ' in each' + ('' if batch_size is None else
                          ', its argument batch_size, from drop_remainder=True')])
                  for count in counts]
        if batch_size is None:
            checks.append(_expected(wanted > 0, [
                '%s gives a batch of 0 examples: expected none without examples' % what]))
        with tf.control_dependencies(checks):
            leaves = tf.nest.map_structure(tf.identity, leaves, expand_composites=True)
        for leaf in leaves:
            if batch_size is not None and isinstance(leaf, tf.Tensor) and (
                    leaf.shape.ndims is not None):
                leaf.set_shape([batch_size] + leaf.shape.as_list()[1:])
        return tf.nest.pack_sequence_as(batch, leaves)
    return compat.map_batches(dataset, checked)


def _check_size(what, size, batch_size):
    """Raises `OwnDataError` for batches of another size than they have to be, where both are known.
    """
    if batch_size is not None and size not in (None, batch_size):
        raise OwnDataError('%s gives batches of %d: expected the %d of its argument batch_size.' % (
            what, size, batch_size))


def _rows(leaf):
    """Examples of one part of a batch, an int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return (leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else tf.shape(
        leaf, out_type=tf.int64))[0]


def _expected(condition, parts):
    text = tf.strings.join([part if isinstance(part, str) else tf.as_string(part)
                            for part in parts])
    return tf.Assert(condition, [text])


def _kinds_text(kinds):
    """The classes of a nest of tensors, as a text such as '({image: Tensor}, SparseTensor)'."""
    if isinstance(kinds, dict):
        return '{%s}' % ', '.join('%s: %s' % (name, _kinds_text(kind))
                                  for name, kind in kinds.items())
    if isinstance(kinds, (tuple, list)):
        return '(%s)' % ', '.join(_kinds_text(kind) for kind in kinds)
    # A ragged tensor's kind is its whole specification.
    return getattr(kinds, '__name__', type(kinds).__name__.replace('Spec', ''))


def _is_count(value, least=1):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def _checked_numbers(name, given, unit):
    """Number of examples by split, as a dict."""
    if not (isinstance(given, dict) and all(_is_count(given.get(split))
                                            for split in ('train', 'test'))):
        raise InvalidArgumentError("%s says of num_examples %.80r: expected a dict such as "
                                   "{'train': 3320, 'test': 350}, how many %s each has."
                                   % (name, given, unit))
    return {split: int(number) if _is_count(number, 0) else number
            for split, number in given.items()}


def takes(function, *arguments, **named):
    """Whether it can be called so; Python's own without a signature are taken to do."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


@contextlib.contextmanager
def calling(name, what, flag='dataset', kind=OwnDataError):
    """Within it, where code of the user's runs, its errors become one of that kind, by name.

    Args:
      name: `module:function`.
      what: of it is called.
      flag: that names it.
      kind: of the error.
    """
    try:
        yield
    except TowersError:
        raise
    except (Exception, SystemExit) as error:
        if compat.missing_layers(error):
            raise  # the towers say what to install
        text = ' '.join(str(error).split())
        raise kind('--%s=%s: %s raised %s%s' % (
            flag, name, what, type(error).__name__, ': %.200s' % text if text else '')) from error


def own_function(name, flag='dataset', kind=OwnDataError,
                 example='flowers:batches for the function batches of flowers.py'):
    """The function that `module:function` stands for.

    Args:
      name, flag, kind: as of `calling`.
      example: of a name, for the error.

    Raises:
      InvalidArgumentError: there is no such module or function.
      kind: the module raised an error.
    """
    module_name, _, function_name = name.partition(':')
    if not module_name or module_name.startswith('.') or not function_name:
        raise InvalidArgumentError('--%s=%s: expected module:function, such as %s.' % (
            flag, name, example))
    function = getattr(_module(name, module_name, flag, kind), function_name, None)
    if not callable(function):
        raise InvalidArgumentError('The module %s has no function %r, which --%s=%s names.' % (
            module_name, function_name, flag, name))
    return function


def own_set(name, data_dir=None):
    """The data set that `module:function` stands for.

    Raises:
      InvalidArgumentError: there is no such module or function, or it returned something else.
      OwnDataError: the module or the function raised an error.
    """
    function = own_function(name)
    if not takes(function, data_dir):
        raise InvalidArgumentError('%s cannot be called with one argument: expected a function of '
                                   'data_dir, the folder of --data_dir or None.' % name)
    with calling(name, name.partition(':')[2]):
        fields = function(data_dir)
    if hasattr(fields, 'train_batches'):
        return fields
    missing = [field for field in _FIELDS if not isinstance(fields, dict) or field not in fields]
    if missing:
        raise InvalidArgumentError('%s returned %.80r: expected a dict with %s; %s %s missing.' % (
            name, fields, ', '.join(_FIELDS), ', '.join(missing),
            'is' if len(missing) == 1 else 'are'))
    return Own(name, fields)


def _module(name, module_name, flag, kind):
    """The module, from the working directory or installed."""
    added = os.getcwd() not in sys.path
    if added:
        sys.path.insert(0, os.getcwd())
    try:
        with calling(name, 'the module %s' % module_name, flag, kind):
            try:
                return importlib.import_module(module_name)
            except ImportError as error:
                raise InvalidArgumentError(
                    'Cannot import the module of --%s=%s: %s. It has to be in the working '
                    'directory, or installed.' % (flag, name, error)) from None
    finally:
        if added:
            sys.path.remove(os.getcwd())
