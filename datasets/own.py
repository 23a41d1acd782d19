"""A data set of the user's own: `--dataset=module:function`.

    def reviews(data_dir):                       # reviews.py, in the folder of the run or installed
        return {'num_examples': {'train': 25000, 'test': 25000},
                'train_batches': train_batches, 'eval_batches': eval_batches}

`train_batches(batch_size, seed, first_example)` returns a `tf.data.Dataset` that does not end, of
batches `(features, labels)`, or of features alone: tensors [batch, …] in any structure, which a
model of the user's own takes. `eval_batches(batch_size)` returns one that ends. `first_example` is
a scalar int64 tensor: how many examples a run that resumes has seen. A pipeline that does not go by
it resumes with other examples than it would have had. Worker w of W of a cluster takes every Wth
batch, from the wth on: all make them all, so that a pipeline has to give each machine the same.

With `'num_classes': 5` in the dict the data are images of that many classes, for a network by name.
Both functions have the arguments `image_size` and `channels` as well, and give `(images, labels)`:
images of a floating-point type, which become float32; labels of int64, the numbers of classes.
`image_size` is what --image_size says, or the network's own size, or None; the network is made for
the images as they come, which are of one size for training and testing.

Data that do not keep to this are an error that names `--dataset=module:function`: before the run
where the static shapes and types tell, else in the step that would have had the batch.
"""

import numbers

import tensorflow.compat.v1 as tf

from datasets.epochs import checked_share
from datasets.errors import OwnDataError
from datasets.own_code import calling, own_function, takes
from towers import compat
from towers.errors import InvalidArgumentError

_FIELDS = ('num_examples', 'train_batches', 'eval_batches')
_OF_IMAGES = ('image_size', 'channels')
_ARGUMENTS = {'train_batches': ('batch_size', 'seed', 'image_size', 'channels', 'first_example'),
              'eval_batches': ('batch_size', 'image_size', 'channels')}


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


class Own:
    """The data set that a user's function returned.

    Attributes: as those of `ImageSet`; `num_classes` is None where the data are no images of
    classes.
    """

    image_shape = (None, None, None)

    def __init__(self, name, fields):
        """
        Raises:
          InvalidArgumentError: a field is not what it has to be.
        """
        self.name = name
        self.num_classes = fields.get('num_classes')
        if self.num_classes is not None:
            if not _is_count(self.num_classes):
                raise InvalidArgumentError('%s says of num_classes %.80r: expected a whole number '
                                           'of at least 1.' % (name, self.num_classes))
            self.num_classes = int(self.num_classes)  # NumPy's would not do as a dimension
        given = fields['num_examples']
        if not (isinstance(given, dict) and all(_is_count(given.get(split))
                                                for split in ('train', 'test'))):
            raise InvalidArgumentError("%s says of num_examples %.80r: expected a dict such as "
                                       "{'train': 3320, 'test': 350}, how many examples each has."
                                       % (name, given))
        self.num_examples = {split: int(given[split]) for split in ('train', 'test')}
        for field, arguments in _ARGUMENTS.items():
            arguments = self._taken(dict.fromkeys(arguments))
            if not takes(fields[field], **arguments):
                raise InvalidArgumentError(
                    '%s of %s is %.80r: expected a function that takes the arguments %s by '
                    'name.' % (field, name, fields[field], ', '.join(arguments)))
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
        """The user's test batches; raises as `train_batches`.

        They fail where they are more than `num_examples` says: a pipeline whose end TensorFlow
        does not know would else be evaluated for ever.
        """
        said = self.num_examples['test']

        def count(before, batch):
            found = before + _rows(tf.nest.flatten(batch)[-1])
            check = _expected(found <= said, [
                'eval_batches of %s gives ' % self.name, found, ' examples or more, and its '
                'num_examples says %d for test: correct that, or end the pipeline by '
                '.take(%d)' % (said, said)])
            with tf.control_dependencies([check]):
                return tf.identity(found), batch
        with tf.device('/cpu:0'):
            with calling(self.name, 'eval_batches'):
                batches = self._eval(**self._taken(dict(
                    batch_size=batch_size, image_size=image_size, channels=channels)))
            return self._checked('eval_batches', batches, channels).apply(
                tf.data.experimental.scan(tf.constant(0, tf.int64), count))

    def _checked(self, function, dataset, channels, batch_size=None):
        """The data set, whose batches fail where they are not what they have to be.

        Args:
          function: name of the user's function.
          dataset: what it returned.
          channels: of the images.
          batch_size: that of every batch; None for any.
        """
        what = '%s of %s' % (function, self.name)
        if not isinstance(dataset, compat.DATASET_TYPES):
            raise OwnDataError('%s returned a %s: expected a tf.data.Dataset.' % (
                what, type(dataset).__name__))
        if tf.data.experimental.to_variant(dataset).graph is not tf.get_default_graph():
            raise OwnDataError('%s returned a tf.data.Dataset of another graph: expected one that '
                               'it makes each time it is called, without a tf.Graph() of its own.'
                               % what)
        shapes = tf.data.get_output_shapes(dataset)
        if type(shapes) is tuple and len(shapes) > 2:
            raise OwnDataError('%s gives elements of %d parts: expected (features, labels), or '
                               'features alone; put several into a dict.' % (what, len(shapes)))
        if self.num_classes is not None:
            self._check_images(what, dataset, channels)
        if any(shape.ndims == 0 for shape in tf.nest.flatten(shapes)):
            raise OwnDataError('%s gives elements of the shapes %s: expected batches, [batch, …] '
                               'each, from .batch(batch_size) or .padded_batch.' % (
                                   what, compat.shapes_text(shapes)))
        sizes = {shape.as_list()[0] for shape in tf.nest.flatten(shapes) if shape.ndims} - {None}
        if len(sizes | ({batch_size} - {None})) > 1:
            raise OwnDataError('%s gives parts of %s examples in a batch: expected %s in each.' % (
                what, ' and '.join(str(size) for size in sorted(sizes)),
                'as many' if batch_size is None else
                'the %d of its argument batch_size' % batch_size))
        dataset = compat.map_batches(dataset, lambda *batch: _checked_batch(
            what, batch if len(batch) > 1 else batch[0], batch_size))
        return dataset if self.num_classes is None else compat.map_batches(
            dataset, lambda images, labels: (
                tf.cast(images, tf.float32), _checked_labels(what, labels, self.num_classes)))

    def _check_images(self, what, dataset, channels):
        """Raises `OwnDataError` for a data set of no images and labels by its static shapes."""
        shapes, types = (get(dataset) for get in (
            tf.data.get_output_shapes, tf.data.get_output_types))
        if tf.data.get_output_classes(dataset) != (tf.Tensor, tf.Tensor):
            raise OwnDataError(
                '%s gives elements of another structure than (Tensor, Tensor), the images and the '
                'labels, both dense: end it with a .map() that returns these two.' % what)
        if not types[0].is_floating or types[1] != tf.int64:
            raise OwnDataError(
                '%s gives elements of the types %s and %s: expected float32 images and int64 '
                'labels: tf.cast them, and divide images of whole numbers by their white.' % (
                    what, types[0].name, types[1].name))
        if shapes[0].ndims != 4 or shapes[1].ndims != 1 or shapes[0].as_list()[3] is None:
            raise OwnDataError(
                '%s gives elements of the shapes %s: expected (images [batch, height, width, '
                'channels], labels [batch]), a label the number of a class; from output_shapes of '
                'from_generator, or from set_shape in a map.' % (what, compat.shapes_text(shapes)))
        _, height, width, found = shapes[0].as_list()
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


def _checked_batch(what, batch, batch_size):
    """A batch, which fails where it has not `batch_size` examples in every part; as many in each,
    and at least one, if that is None."""
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
        if batch_size is not None and isinstance(leaf, tf.Tensor) and leaf.shape.ndims is not None:
            leaf.set_shape([batch_size] + leaf.shape.as_list()[1:])
    return tf.nest.pack_sequence_as(batch, leaves)


def _checked_labels(what, labels, num_classes):
    # The texts have no quotes: TensorFlow would put backslashes before them.
    outside = tf.boolean_mask(labels, tf.logical_or(labels < 0, labels >= num_classes))
    check = _expected(tf.equal(tf.size(outside), 0), [
        '%s gives the label ' % what, tf.concat([outside, [0]], 0)[0],
        ': expected 0 to %d' % (num_classes - 1)])
    with tf.control_dependencies([check]):
        return tf.identity(labels)


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


def _is_count(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1
