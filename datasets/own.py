"""A data set of the user's own: `--dataset=module:function`.

    def reviews(data_dir):                       # reviews.py, in the folder of the run or installed
        return {'num_examples': {'train': 25000, 'test': 25000},
                'train_batches': train_batches, 'eval_batches': eval_batches}

`train_batches(batch_size, seed, first_example)` returns a `tf.data.Dataset` that does not end, of
batches `(features, labels)`, or of features alone: tensors [batch, …] in any structure, which a
model of the user's own takes. `eval_batches(batch_size)` returns one that ends. `first_example` is
a scalar int64 tensor: how many examples a run that resumes has seen. Worker w of W of a cluster
takes every Wth batch, from the wth on: a pipeline has to give each machine the same.

With `'num_classes': 5` in the dict the data are images of that many classes, for a network by name.
Both functions have the arguments `image_size` and `channels` as well, and give images of a
floating-point type, which become float32, and labels of int64, the numbers of classes. `image_size`
is what --image_size says, or the network's own size, or None; the network is made for the images as
they come, which are of one size for training and testing.

Data that do not keep to this are an error that names `--dataset=module:function`: before the run
where the static shapes and types tell, else in the step that would have had the batch.
"""

import tensorflow.compat.v1 as tf

from datasets.errors import OwnDataError
from datasets.own_code import calling, own_function, takes
from towers import compat
from towers.arguments import check_count, check_instance
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
    if not isinstance(fields, dict) or not set(_FIELDS) <= set(fields):
        raise InvalidArgumentError('%s returned %.80r: expected a dict with %s.' % (
            name, fields, ', '.join(_FIELDS)))
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
            check_count('num_classes of %s' % name, self.num_classes)
            self.num_classes = int(self.num_classes)  # NumPy's would not do as a dimension
        given = fields['num_examples']
        check_instance('num_examples of %s' % name, given, dict, "a dict such as {'train': 3320, "
                       "'test': 350}, how many examples each has")
        for split in ('train', 'test'):
            check_count('num_examples of %s for %s' % (name, split), given.get(split))
        self.num_examples = {split: int(given[split]) for split in ('train', 'test')}
        self._functions = fields
        for field, arguments in _ARGUMENTS.items():
            arguments = self._taken(dict.fromkeys(arguments))
            if not takes(fields[field], **arguments):
                raise InvalidArgumentError(
                    '%s of %s is %.80r: expected a function that takes the arguments %s by '
                    'name.' % (field, name, fields[field], ', '.join(arguments)))
        self._size = None  # height and width of the images, once they are known

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
        worker, workers = share
        with tf.device('/cpu:0'):
            batches = self._batches('train_batches', batch_size, dict(
                batch_size=batch_size, seed=seed, image_size=image_size, channels=channels,
                first_example=tf.cast(first_example, tf.int64)))
            return batches if workers == 1 else batches.shard(workers, worker)

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
            return self._batches('eval_batches', None, dict(
                batch_size=batch_size, image_size=image_size, channels=channels)).apply(
                    tf.data.experimental.scan(tf.constant(0, tf.int64), count))

    def _batches(self, function, batch_size, arguments):
        """The data set of a user's function, whose batches fail where they are not what they have
        to be.

        Args:
          function: its name.
          batch_size: that of every batch; None for any.
          arguments: a dict, of which it takes those that it has.
        """
        what = '%s of %s' % (function, self.name)
        with calling(self.name, function):
            dataset = self._functions[function](**self._taken(arguments))
        if not isinstance(dataset, compat.DATASET_TYPES):
            raise OwnDataError('%s returned a %s: expected a tf.data.Dataset.' % (
                what, type(dataset).__name__))
        if tf.data.experimental.to_variant(dataset).graph is not tf.get_default_graph():
            raise OwnDataError('%s returned a tf.data.Dataset of another graph: expected one that '
                               'it makes each time it is called, without a tf.Graph() of its own.'
                               % what)
        shapes = tf.data.get_output_shapes(dataset)
        if self.num_classes is not None:
            self._check_images(what, dataset, arguments['channels'])
        elif type(shapes) is tuple and len(shapes) > 2 or any(
                shape.ndims == 0 for shape in tf.nest.flatten(shapes)):
            raise OwnDataError(
                '%s gives elements of the shapes %s: expected batches of (features, labels), or of '
                'features alone, [batch, …] each, from .batch(batch_size) or .padded_batch; '
                'several features in a dict.' % (what, compat.shapes_text(shapes)))
        sizes = {shape.as_list()[0] for shape in tf.nest.flatten(shapes) if shape.ndims} - {None}
        if batch_size is not None and sizes - {batch_size}:
            raise OwnDataError('%s gives batches of the shapes %s: expected %d examples in each, '
                               'its argument batch_size.' % (
                                   what, compat.shapes_text(shapes), batch_size))
        dataset = compat.map_batches(dataset, lambda *batch: _checked_batch(
            what, batch if len(batch) > 1 else batch[0], batch_size))
        return dataset if self.num_classes is None else compat.map_batches(
            dataset, lambda images, labels: (
                tf.cast(images, tf.float32), _checked_labels(what, labels, self.num_classes)))

    def _check_images(self, what, dataset, channels):
        """Raises `OwnDataError` for a data set of no images and labels by its static shapes."""
        shapes, types = (get(dataset) for get in (
            tf.data.get_output_shapes, tf.data.get_output_types))
        if (tf.data.get_output_classes(dataset) != (tf.Tensor, tf.Tensor)
                or not types[0].is_floating or types[1] != tf.int64
                or shapes[0].ndims != 4 or shapes[1].ndims != 1
                or shapes[0].as_list()[3] != channels):
            raise OwnDataError(
                '%s gives elements of the shapes %s and the types %s: expected images of a '
                'floating-point type [batch, height, width, %d], and their classes, int64 [batch]; '
                'end it with a .map() that returns these two, with set_shape or output_shapes '
                'where shapes are unknown.' % (
                    what, compat.shapes_text(shapes), ' and '.join(
                        each.name for each in tf.nest.flatten(types)), channels))
        size = shapes[0].as_list()[1:3]
        if None not in size:
            if self._size not in (None, size):
                raise OwnDataError(
                    '%s gives images of %d x %d pixels, and the other function of %d x %d: '
                    'expected one size.' % ((what,) + tuple(size + self._size)))
            self._size = size


def _checked_batch(what, batch, batch_size):
    """A batch, which fails where it has not `batch_size` examples in every part; or, if that is
    None, as many in each, and at least one."""
    leaves = tf.nest.flatten(batch)
    counts = tf.stack([_rows(leaf) for leaf in leaves])
    is_good = (tf.equal(counts, counts[0]) & (counts > 0) if batch_size is None
               else tf.equal(counts, batch_size))
    check = _expected(tf.reduce_all(is_good), [
        '%s gives a batch of ' % what, tf.strings.reduce_join(tf.as_string(counts), separator=', '),
        ' examples by its parts: expected ' + (
            'as many in each, and at least one' if batch_size is None else
            '%d in each, its argument batch_size, from drop_remainder=True' % batch_size)])
    with tf.control_dependencies([check]):
        leaves = tf.nest.map_structure(tf.identity, leaves, expand_composites=True)
    for leaf in leaves:
        if batch_size is not None and isinstance(leaf, tf.Tensor) and leaf.shape.ndims is not None:
            leaf.set_shape([batch_size] + leaf.shape.as_list()[1:])
    return tf.nest.pack_sequence_as(batch, leaves)


def _checked_labels(what, labels, num_classes):
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
    # The texts have no quotes: TensorFlow would put backslashes before them.
    return tf.Assert(condition, [tf.strings.join([
        part if isinstance(part, str) or part.dtype == tf.string else tf.as_string(part)
        for part in parts])])
