"""A folder of class folders of JPEG and PNG files: train/<class>/*.jpg, test/<class>/*.jpg.

Classes are numbered from 0 in the order of their names, those of the training images for all.
Without a folder `train`, the class folders stand in the folder itself, and every fifth image of
each class, from the first on, is a test image.
"""

import os

import numpy as np

from datasets.errors import DatasetError, names_in

_ENDINGS = ('.jpg', '.jpeg', '.png')
_TEST_NAMES = ('test', 'validation', 'val')
_TEST_EVERY = 5


class FolderImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, paths, labels):
        self.paths, self.labels = list(paths), np.asarray(labels, np.int64)

    def __len__(self):
        return len(self.paths)

    def where(self, number):
        """The path of an image."""
        return self.paths[number]

    def name(self, number):
        """The name of an image that stays when its folder is moved, `daisy/1.jpg`."""
        return '/'.join(self.paths[number].split(os.sep)[-2:])

    def names(self):
        """What images are numbered by: list of class folders and files."""
        return [self.name(number) for number in range(len(self))]

    def image(self, number):
        """`(encoded, label)` of an image.

        Raises:
          DatasetError: the file cannot be read; the text goes on after its place.
        """
        try:
            with open(self.paths[number], 'rb') as image:
                return image.read(), self.labels[number]
        except OSError as error:
            raise DatasetError('cannot be read: %s' % (error.strerror or error))

    def is_intact(self, number):
        """Files have no checksum of their own."""
        return True


def folder_splits(data_dir):
    """`(classes, {'train': FolderImages, 'test': FolderImages})` of a folder.

    Raises:
      DatasetError: there is no such folder, it or one in it cannot be read, it has no class
        folders, a class of the training images has none, or the test images have a class that the
        training images lack.
    """
    names_in(data_dir)
    train = os.path.join(data_dir, 'train')
    if not os.path.isdir(train):
        return _every_fifth_for_testing(data_dir)
    classes = _folders(train)
    test = next((os.path.join(data_dir, name) for name in _TEST_NAMES
                 if os.path.isdir(os.path.join(data_dir, name))), None)
    if test is None:
        raise DatasetError(
            '%s has a folder train, but none named %s: make one, with class folders of the images '
            'to test on, or move the class folders out of train: without it, every fifth image is '
            'for testing.' % (data_dir, ' or '.join(_TEST_NAMES)))
    tested = _folders(test)
    unknown = sorted(set(tested) - set(classes))
    if unknown:
        raise DatasetError(
            '%s has a class %r that %s does not have: give the folder the name of a class, move it '
            'away, or add images of it to train on.' % (test, unknown[0], train))
    return classes, {'train': FolderImages(*_images(train, classes, classes)),
                     'test': FolderImages(*_images(test, tested, classes))}


def _every_fifth_for_testing(data_dir):
    classes = _folders(data_dir)
    paths, labels = (np.array(each, kind) for each, kind in zip(
        _images(data_dir, classes, classes), (object, np.int64)))
    is_test = np.zeros(len(paths), bool)
    for label in range(len(classes)):
        of_class = np.flatnonzero(labels == label)
        if len(of_class) > 1:  # a class of one image has to be learned before it is tested
            is_test[of_class[::_TEST_EVERY]] = True
    if not is_test.any():
        raise DatasetError('%s has one image a class, which is to train on, so that nothing is '
                           'left to test on: add images, or folders train and test.' % data_dir)
    return classes, {'train': FolderImages(paths[~is_test], labels[~is_test]),
                     'test': FolderImages(paths[is_test], labels[is_test])}


def _folders(parent):
    found = [name for name in names_in(parent)
             if os.path.isdir(os.path.join(parent, name)) and not name.startswith('.')]
    if not found:
        raise DatasetError(
            '%s has no folders: expected one for each class, with its images: move each image into '
            'one, such as %s.' % (parent, os.path.join(parent, 'daisy', '1.jpg')))
    return found


def _images(parent, folders, classes):
    """`(paths, labels)` of the images in class folders."""
    paths, labels = [], []
    for folder in folders:
        inside = [os.path.join(parent, folder, name)
                  for name in names_in(os.path.join(parent, folder)) if not name.startswith('.')]
        found = [path for path in inside if is_image(path)]
        if not found:
            deep = [path for path in inside if os.path.isdir(path)]
            raise DatasetError('The folder %s has no images: expected files %s.%s' % (
                os.path.join(parent, folder), '*' + ', *'.join(_ENDINGS),
                ' Folders within class folders are not looked into, such as %s: move the images '
                'up.' % deep[0] if deep else ''))
        paths += found
        labels += [classes.index(folder)] * len(found)
    return paths, labels


def is_image(path):
    """Whether a path is that of an image by its name. A pipe is none, since reading it would wait
    for ever; a link that leads nowhere is one that cannot be read."""
    return path.lower().endswith(_ENDINGS) and (
        os.path.isfile(path) or not os.path.exists(path))
