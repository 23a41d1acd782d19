"""A data set of the user's own: `--dataset=module:function`.

    def reviews(data_dir):                       # reviews.py, in the folder of the run or installed
        return {'num_examples': {'train': 25000, 'test': 25000},
                'train_batches': train_batches, 'eval_batches': eval_batches}

`train_batches(batch_size, seed, first_example)` returns a `tf.data.Dataset` that does not end, of
batches `(features, labels)`, or of features alone: tensors [batch, …] in any structure, which a
model of the user's own takes. `eval_batches(batch_size)` returns a data set that ends.
`first_example` is a scalar int64 tensor: how many examples a run that resumes has seen. Worker w of
W of a cluster takes every Wth batch, from the wth on: a pipeline has to give each machine the same
batches.

With `'num_classes': 5` in the dict the data are images of that many classes, for a network by name;
`'image_shape': (32, 32, 3)`, height, width and channels, says their shape to a network that takes
any shape, such as `digits`, which else asks for images of one channel.
Both functions then have the arguments `image_size` and `channels` as well, and give images of a
floating-point type, which become float32, and labels of int64, the numbers of classes. `image_size`
is what --image_size says, or the network's own size, or None; the network is made for the images as
they come, which are of one size for training and testing.

Data of another form are an error that names `--dataset=module:function`. If the static shapes and
types show it, the error comes before the run; else in the step that would have had the batch.
"""

import typing

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


def own_set(name: str, data_dir: typing.Optional[str] = None) -> 'Own':
    """The data set that `module:function` stands for.

    Args:
      name: `module:function`.
      data_dir: what the function is called with.

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

    It has the attributes of `ImageSet`. `num_classes` is None where the data are no images of
    classes, and `image_shape` has None for a side that the user does not give.
    """

    def __init__(self, name: str, fields: dict):
        """
        Args:
          name: `module:function`.
          fields: what the function returned.

        Raises:
          InvalidArgumentError: a field is not what it has to be.
        """
        self.name = name
        self.num_classes = fields.get('num_classes')
        if self.num_classes is not None:
            check_count('num_classes of %s' % name, self.num_classes)
            self.num_classes = int(self.num_classes)  # an int of NumPy is no dimension
        self.image_shape = _checked_shape(name, fields.get('image_shape', (None, None, None)))
        self.num_examples = self._checked_counts(fields['num_examples'])
        self._functions = fields
        for field, arguments in _ARGUMENTS.items():
            self._check_function(field, arguments)
        self._size = None  # height and width of the images, once they are known

    def _checked_counts(self, counts: typing.Any):
        """A dict from each split to its number of examples, from the user's `counts`."""
        check_instance('num_examples of %s' % self.name, counts, dict,
                       "a dict such as {'train': 3320, 'test': 350}, how many examples each has")
        checked = {}
        for split in ('train', 'test'):
            check_count('num_examples of %s for %s' % (self.name, split), counts.get(split))
            checked[split] = int(counts[split])
        return checked

    def _check_function(self, field, arguments):
        """Raises `InvalidArgumentError` where a field is no function of these arguments."""
        arguments_by_name = self._taken({name: None for name in arguments})
        if not takes(self._functions[field], **arguments_by_name):
            raise InvalidArgumentError(
                '%s of %s is %.80r: expected a function that takes the arguments %s by '
                'name.' % (field, self.name, self._functions[field], ', '.join(arguments_by_name)))

    def _taken(self, arguments: dict) -> dict:
        """The arguments, by name, that the user's functions take: for a data set of images all
        `arguments`; for any other data set only the arguments that do not describe images."""
        if self.num_classes is not None:
            return arguments
        return {name: value for name, value in arguments.items() if name not in _OF_IMAGES}

    def train_batches(self, batch_size: int, seed: int, image_size: typing.Optional[int] = None,
                      channels: int = 3, first_example: typing.Any = 0, shift: int = 0,
                      remainder: str = 'carry',
                      share: typing.Tuple[int, int] = (0, 1)) -> tf.data.Dataset:
        """The batches of the user's function; for each of W workers, every Wth batch.

        Raises:
          InvalidArgumentError: `shift` or `remainder` is given: the user's function decides these.
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
            if workers == 1:
                return batches
            return batches.shard(workers, worker)

    def eval_batches(self, batch_size: int, image_size: typing.Optional[int] = None,
                     channels: int = 3) -> tf.data.Dataset:
        """The batches of the user's function for the test; raises what `train_batches` raises.

        An evaluation fails when it gets more examples than `num_examples` says. Else it would never
        end, if the pipeline has no end.
        """
        said = self.num_examples['test']

        def count(before: tf.Tensor, batch: typing.Any) -> tuple:
            """Counts the examples of a batch, and fails when there are too many.

            Args:
              before: the number of examples in the batches before.
              batch: the batch.

            Returns:
              The number of examples so far, and the batch.
            """
            any_leaf = tf.nest.flatten(batch)[-1]  # `checked` has found as many in all
            found = before + _rows(any_leaf)
            check = _expected(found <= said, [
                'eval_batches of %s gives ' % self.name, found, ' examples or more, and its '
                'num_examples says %d for test: correct that, or end the pipeline by '
                '.take(%d)' % (said, said)])
            with tf.control_dependencies([check]):
                return tf.identity(found), batch
        with tf.device('/cpu:0'):
            batches = self._batches('eval_batches', None, dict(
                batch_size=batch_size, image_size=image_size, channels=channels))
            return batches.apply(tf.data.experimental.scan(tf.constant(0, tf.int64), count))

    def _batches(self, function: str, batch_size: typing.Optional[int],
                 arguments: dict) -> tf.data.Dataset:
        """The data set that a user's function returns, with checks: a step fails on a batch of
        another form than a batch has to have.

        Args:
          function: the name of the function.
          batch_size: the size that every batch has to have; None for any.
          arguments: dict of arguments; the function is called with the arguments that it takes.
        """
        what = '%s of %s' % (function, self.name)
        dataset = self._called(function, arguments)
        _check_not_ragged(what, dataset)
        if self.num_classes is not None:
            self._check_images(what, dataset, arguments['channels'])
        else:
            _check_batches(what, tf.data.get_output_shapes(dataset))
        _check_batch_size(what, tf.data.get_output_shapes(dataset), batch_size)

        def checked(*batch: typing.Any) -> typing.Any:
            """A batch with its checks. `tf.data` gives features and labels as two arguments, and
            features alone as one."""
            if len(batch) == 1:
                return _checked_batch(what, batch[0], batch_size)
            return _checked_batch(what, batch, batch_size)

        def checked_images(images: tf.Tensor, labels: tf.Tensor) -> tuple:
            """A batch of images as floats, with labels that are classes."""
            return tf.cast(images, tf.float32), _checked_labels(what, labels, self.num_classes)
        dataset = compat.map_batches(dataset, checked)
        if self.num_classes is not None:
            dataset = compat.map_batches(dataset, checked_images)
        return dataset

    def _called(self, function: str, arguments: dict):
        """Calls the user's function of this name; returns its data set, which is of this graph.

        Raises:
          OwnDataError: the function raised an error, or returned something else.
        """
        with calling(self.name, function):
            dataset = self._functions[function](**self._taken(arguments))
        what = '%s of %s' % (function, self.name)
        if not isinstance(dataset, compat.DATASET_TYPES):
            raise OwnDataError('%s returned a %s: expected a tf.data.Dataset.' % (
                what, type(dataset).__name__))
        if tf.data.experimental.to_variant(dataset).graph is not tf.get_default_graph():
            raise OwnDataError('%s returned a tf.data.Dataset of another graph: expected one that '
                               'it makes each time it is called, without a tf.Graph() of its own.'
                               % what)
        return dataset

    def _check_images(self, what: str, dataset: tf.data.Dataset, channels: int):
        """Raises `OwnDataError` for a data set whose static shapes are not of images and labels.

        Args:
          what: names the function that made the data set.
          dataset: the data set.
          channels: the number of channels that the images have to have.
        """
        shapes = tf.data.get_output_shapes(dataset)
        types = tf.data.get_output_types(dataset)
        given_channels = _channels_of(dataset)
        if given_channels is not None and given_channels != channels:
            raise OwnDataError(
                '%s gives images of %d channels, and the network asks for %d (the argument '
                "channels): give these, or add 'image_shape': (height, width, %d) to the dict, for "
                'a network that takes any number, such as digits.' % (
                    what, given_channels, channels, given_channels))
        if not _is_of_images(dataset, channels):
            type_names = ' and '.join(each.name for each in tf.nest.flatten(types))
            raise OwnDataError(
                '%s gives elements of the shapes %s and the types %s: expected images of a '
                'floating-point type [batch, height, width, %d], and their classes, int64 [batch]; '
                'end it with a .map() that returns these two, with set_shape or output_shapes '
                'where shapes are unknown.' % (
                    what, compat.shapes_text(shapes), type_names, channels))
        size = shapes[0].as_list()[1:3]
        if None in size:
            return
        # The first function that gives images of a known size sets it for the other function.
        if self._size not in (None, size):
            raise OwnDataError(
                '%s gives images of %d x %d pixels, and the other function of %d x %d: '
                'expected one size.' % ((what,) + tuple(size + self._size)))
        self._size = size


def _checked_shape(name: str, shape: typing.Any):
    """Returns the `image_shape` of a user's dict as a tuple; raises `InvalidArgumentError`."""
    called = 'image_shape of %s' % name
    expected = 'height, width and channels, such as (32, 32, 3)'
    check_instance(called, shape, (tuple, list), expected)
    if len(shape) != 3:
        raise InvalidArgumentError('%s=%.80r: expected %s.' % (called, shape, expected))
    for side in shape:
        if side is not None:
            check_count(called, side)
    return tuple(None if side is None else int(side) for side in shape)


def _check_not_ragged(what: str, dataset: tf.data.Dataset):
    """Raises `OwnDataError` for a data set with ragged tensors, which towers do not cut."""
    specs = tf.nest.flatten(tf.data.experimental.get_structure(dataset))
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs):
        raise OwnDataError(
            '%s gives a ragged tensor, which cannot be cut by examples: expected dense or sparse '
            'ones, from .padded_batch, or from a .map() of it to .to_tensor() or .to_sparse().'
            % what)


def _channels_of(dataset: tf.data.Dataset):
    """The static number of channels of the images in a data set of `(images, labels)`; None where
    it is not known, or the data set is of something else."""
    is_pair_of_dense = tf.data.get_output_classes(dataset) == (tf.Tensor, tf.Tensor)
    if not is_pair_of_dense:
        return None
    image_shape, _ = tf.data.get_output_shapes(dataset)
    if image_shape.ndims != 4:
        return None
    return image_shape.as_list()[3]


def _is_of_images(dataset: tf.data.Dataset, channels: int):
    """Whether elements are images [batch, height, width, channels] and int64 labels [batch]."""
    is_pair_of_dense = tf.data.get_output_classes(dataset) == (tf.Tensor, tf.Tensor)
    if not is_pair_of_dense:
        return False
    image_type, label_type = tf.data.get_output_types(dataset)
    if not image_type.is_floating or label_type != tf.int64:
        return False
    image_shape, label_shape = tf.data.get_output_shapes(dataset)
    if image_shape.ndims != 4 or label_shape.ndims != 1:
        return False
    return image_shape.as_list()[3] == channels


def _check_batches(what: str, shapes: typing.Any) -> None:
    """Raises `OwnDataError` if elements of these static shapes are no batches.

    Args:
      what: names the function that made the elements.
      shapes: nest of shapes.
    """
    has_scalars = any(shape.ndims == 0 for shape in tf.nest.flatten(shapes))
    # A plain tuple is (features, labels). A named tuple is a structure of features.
    has_many_parts = type(shapes) is tuple and len(shapes) > 2
    if has_scalars or has_many_parts:
        raise OwnDataError(
            '%s gives elements of the shapes %s: expected batches of (features, labels), or of '
            'features alone, [batch, …] each, from .batch(batch_size) or .padded_batch; '
            'several features in a dict.' % (what, compat.shapes_text(shapes)))


def _check_batch_size(what: str, shapes: typing.Any, batch_size: typing.Optional[int]) -> None:
    """Raises `OwnDataError` for batches that are known to be of another size.

    Args:
      what: names the function that made the batches.
      shapes: nest of their static shapes.
      batch_size: the size that every batch has to have; None for any.
    """
    static_sizes = {shape.as_list()[0] for shape in tf.nest.flatten(shapes) if shape.ndims}
    if batch_size is not None and not static_sizes <= {batch_size, None}:
        raise OwnDataError('%s gives batches of the shapes %s: expected %d examples in each, '
                           'its argument batch_size.' % (
                               what, compat.shapes_text(shapes), batch_size))


def _checked_batch(what, batch, batch_size):
    """Returns a batch with a check, and with a static size if the size is given.

    Args:
      what: names the function that made the batch.
      batch: nest of tensors.
      batch_size: the number of examples that each leaf has to have; None for any number but 0.
    """
    with tf.control_dependencies([_size_check(what, batch, batch_size)]):
        # A sparse leaf consists of three tensors, which `expand_composites` makes leaves.
        checked = tf.nest.map_structure(tf.identity, batch, expand_composites=True)
    if batch_size is not None:
        for leaf in tf.nest.flatten(checked):
            if isinstance(leaf, tf.Tensor) and leaf.shape.ndims is not None:
                leaf.set_shape([batch_size] + leaf.shape.as_list()[1:])
    return checked


def _size_check(what, batch, batch_size):
    """An operation that fails if the leaves of a batch do not have as many examples as they have
    to. The arguments are those of `_checked_batch`."""
    leaves = tf.nest.flatten(batch)
    counts = tf.stack([_rows(leaf) for leaf in leaves])
    if batch_size is None:
        is_good = tf.equal(counts, counts[0]) & (counts > 0)
        expected = 'as many in each, and at least one'
    else:
        is_good = tf.equal(counts, batch_size)
        expected = '%d in each, its argument batch_size, from drop_remainder=True' % batch_size
    return _expected(tf.reduce_all(is_good), [
        '%s gives a batch of ' % what, tf.strings.reduce_join(tf.as_string(counts), separator=', '),
        ' examples by its parts: expected ' + expected])


def _checked_labels(what: str, labels: tf.Tensor, num_classes: int):
    """Returns labels with a check: a step fails if a label is not from 0 to `num_classes` - 1.

    `what` names the function that made them.
    """
    outside = tf.boolean_mask(labels, tf.logical_or(labels < 0, labels >= num_classes))
    # The text of the check is computed also where all labels are good. Then `outside` is empty, and
    # the text gets the 0.
    first_outside = tf.concat([outside, [0]], 0)[0]
    check = _expected(tf.equal(tf.size(outside), 0), [
        '%s gives the label ' % what, first_outside, ': expected 0 to %d' % (num_classes - 1)])
    with tf.control_dependencies([check]):
        return tf.identity(labels)


def _rows(leaf: typing.Any):
    """The number of examples of one leaf of a batch, dense or sparse: an int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _expected(condition, parts):
    """An operation that fails with a text where a condition does not hold.

    The text is joined from `parts`: strings, and tensors of strings or numbers. The strings have no
    quotes in them: TensorFlow would put backslashes before these.
    """
    return tf.Assert(condition, [tf.strings.join([_as_text(part) for part in parts])])


def _as_text(part):
    """A part of a text: a string itself, of a number its digits."""
    if isinstance(part, str) or part.dtype == tf.string:
        return part
    return tf.as_string(part)
