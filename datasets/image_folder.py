"""A folder of class folders of JPEG and PNG files: train/<class>/*.jpg, test/<class>/*.jpg.

Classes are numbered from 0 in the order of their names. The classes of the training images are the
classes of the test images as well.
Without a folder `train`, the class folders stand in the folder itself, and every fifth image of
each class, from the first on, is a test image.

Its test is tests/datasets/test_sets.py.
"""

import os
import typing

import numpy as np

from datasets.errors import DatasetError, names_in

_ENDINGS = ('.jpg', '.jpeg', '.png')
_TEST_NAMES = ('test', 'validation', 'val')
_TEST_EVERY = 5


class FolderImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, paths: typing.Iterable[str], labels: typing.Iterable[int]):
        self.paths = list(paths)
        self.labels = np.asarray(labels, np.int64)

    def __len__(self):
        return len(self.paths)

    def where(self, number: int) -> str:
        """The path of an image."""
        return self.paths[number]

    def name(self, number: int) -> str:
        """The name of an image, which stays the same when its folder is moved: `daisy/1.jpg`."""
        return '/'.join(self.paths[number].split(os.sep)[-2:])

    def names(self) -> typing.List[str]:
        """List of the images' names, by number."""
        return [self.name(number) for number in range(len(self))]

    def image(self, number: int) -> typing.Tuple[bytes, int]:
        """`(encoded, label)` of an image.

        Raises:
          DatasetError: the file cannot be read; the text begins with a verb, to follow the name of
            the file.
        """
        try:
            with open(self.paths[number], 'rb') as image:
                return image.read(), self.labels[number]
        except OSError as error:
            raise DatasetError('cannot be read: %s' % (error.strerror or error))

    def is_intact(self, number: int) -> bool:
        """Files have no checksum of their own."""
        return True


class FolderSplits(typing.NamedTuple):
    """What a folder of class folders holds.

    Attributes:
      classes: the names of the classes, by number.
      images: dict from 'train' and 'test' to `FolderImages`.
    """
    classes: typing.List[str]
    images: typing.Dict[str, FolderImages]


class _Images(typing.NamedTuple):
    """Images of some class folders."""
    paths: typing.List[str]
    labels: typing.List[int]  # the number of the class of each


def folder_splits(data_dir: str) -> FolderSplits:
    """The images of a folder to train on and to test on.

    Raises:
      DatasetError: there is no such folder, it or a folder in it cannot be read, it has no class
        folders, a class folder has no images, or the test images have a class that the training
        images lack.
    """
    names_in(data_dir)  # for its error where the folder cannot be read
    train = os.path.join(data_dir, 'train')
    if not os.path.isdir(train):
        return _every_fifth_for_testing(data_dir)
    classes = _folders(train)
    possible_folders = [os.path.join(data_dir, name) for name in _TEST_NAMES]
    test_folders = list(filter(os.path.isdir, possible_folders))
    if not test_folders:
        raise DatasetError(
            '%s has a folder train, but none named %s: make one, with class folders of the images '
            'to test on, or move the class folders out of train: without it, every fifth image is '
            'for testing.' % (data_dir, ' or '.join(_TEST_NAMES)))
    test = test_folders[0]
    tested = _folders(test)
    unknown = sorted(set(tested) - set(classes))
    if unknown:
        raise DatasetError(
            '%s has a class %r that %s does not have: give the folder the name of a class, move it '
            'away, or add images of it to train on.' % (test, unknown[0], train))
    train_images = _images(train, classes, classes)
    test_images = _images(test, tested, classes)
    return FolderSplits(classes, {
        'train': FolderImages(train_images.paths, train_images.labels),
        'test': FolderImages(test_images.paths, test_images.labels)})


def _every_fifth_for_testing(data_dir: str) -> FolderSplits:
    """The `FolderSplits` of a folder that has no folder of its own for training."""
    classes = _folders(data_dir)
    images = _images(data_dir, classes, classes)
    paths = np.array(images.paths, object)
    labels = np.array(images.labels, np.int64)
    is_test = np.zeros(len(paths), bool)
    for label in range(len(classes)):
        places = np.flatnonzero(labels == label)
        if len(places) > 1:  # a class of one image has to be learned before it is tested
            is_test[places[::_TEST_EVERY]] = True
    if not is_test.any():
        raise DatasetError('%s has one image a class, which is to train on, so that nothing is '
                           'left to test on: add images, or folders train and test.' % data_dir)
    return FolderSplits(classes, {'train': FolderImages(paths[~is_test], labels[~is_test]),
                                  'test': FolderImages(paths[is_test], labels[is_test])})


def _folders(parent: str) -> typing.List[str]:
    """The names of the folders in a folder; raises `DatasetError` where there are none."""
    names = [os.path.basename(path) for path in _paths_in(parent) if os.path.isdir(path)]
    if not names:
        raise DatasetError(
            '%s has no folders: expected one for each class, with its images: move each image into '
            'one, such as %s.' % (parent, os.path.join(parent, 'daisy', '1.jpg')))
    return names


def _paths_in(folder: str) -> typing.List[str]:
    """The paths of what is in a folder, without hidden names."""
    return [os.path.join(folder, name) for name in names_in(folder) if not name.startswith('.')]


def _images(parent: str, folders: typing.List[str], classes: typing.List[str]) -> _Images:
    """The images in class folders, each with its label.

    Args:
      parent: the folder of the class folders.
      folders: the names of the class folders.
      classes: the names of all classes; the label of an image is the index of its class.
    """
    images = _Images([], [])
    for name in folders:
        paths = _image_paths(os.path.join(parent, name))
        images.paths.extend(paths)
        images.labels.extend([classes.index(name)] * len(paths))
    return images


def _image_paths(folder: str) -> typing.List[str]:
    """The paths of the images in a class folder; raises `DatasetError` where there are none."""
    inside = _paths_in(folder)
    paths = list(filter(is_image, inside))
    if paths:
        return paths
    advice = ''
    subfolders = list(filter(os.path.isdir, inside))
    if subfolders:
        advice = (' Folders within class folders are not looked into, such as %s: move the '
                  'images up.' % subfolders[0])
    raise DatasetError('The folder %s has no images: expected files *%s.%s' % (
        folder, ', *'.join(_ENDINGS), advice))


def is_image(path: str) -> bool:
    """Whether a path in a folder is the path of an image, by its name.

    A pipe is no image, since reading it would wait for ever. A link to a file that is gone counts:
    it is an image that cannot be read, and is reported as such.
    """
    if not path.lower().endswith(_ENDINGS):
        return False
    is_broken_link = not os.path.exists(path)  # `path` is from a list of what the folder has
    return os.path.isfile(path) or is_broken_link
