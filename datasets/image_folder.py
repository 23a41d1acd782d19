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

    def __init__(self, paths, labels, others=()):
        """
        Args:
          paths, labels: of the images.
          others: paths of what is left alone: in the class folders what is no JPEG or PNG by its
            name, and folders; beside them, images, and further folders of test images.
        """
        self.paths, self.labels = paths, np.asarray(labels, np.int64)
        self.others = list(others)

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
          DatasetError: the file cannot be read.
        """
        try:
            with open(self.paths[number], 'rb') as image:
                return image.read(), self.labels[number]
        except OSError as error:
            raise DatasetError('Cannot read %s: %s.' % (self.paths[number],
                                                        error.strerror or error))

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
    tests = [os.path.join(data_dir, name) for name in _TEST_NAMES
             if os.path.isdir(os.path.join(data_dir, name))]
    if not tests:
        raise DatasetError(
            '%s has a folder train, but none named %s: make one, with class folders of the images '
            'to test on, or move the class folders out of train: without it, every fifth image is '
            'for testing.' % (data_dir, ' or '.join(_TEST_NAMES)))
    unknown = sorted(set(_folders(tests[0])) - set(classes))
    if unknown:
        raise DatasetError(
            '%s has a class %r that %s does not have: give the folder the name of a class, move it '
            'away, or add images of it to train on.' % (tests[0], unknown[0], train))
    found = {'train': FolderImages(*_images(train, classes)),
             'test': FolderImages(*_images(tests[0], classes, all_classes=False))}
    found['test'].others.extend(tests[1:])
    return classes, found


def _every_fifth_for_testing(data_dir):
    classes = _folders(data_dir)
    paths, labels, others = _images(data_dir, classes)
    labels, is_test = np.asarray(labels), np.zeros(len(paths), bool)
    for label in range(len(classes)):
        of_class = np.flatnonzero(labels == label)
        if len(of_class) > 1:  # a class of one image has to be learned before it is tested
            is_test[of_class[::_TEST_EVERY]] = True
    if not is_test.any():
        raise DatasetError('%s has one image a class, which is to train on, so that nothing is '
                           'left to test on: add images, or make folders train and test.'
                           % data_dir)

    def images(wanted, others):
        return FolderImages([path for path, test in zip(paths, is_test) if test == wanted],
                            labels[is_test == wanted], others)
    return classes, {'train': images(False, others), 'test': images(True, ())}


def _folders(parent):
    found = [name for name in names_in(parent)
             if os.path.isdir(os.path.join(parent, name)) and not name.startswith('.')]
    if not found:
        raise DatasetError(
            '%s has no folders: expected one for each class, with its images: move each image into '
            'one, such as %s.' % (parent, os.path.join(parent, 'daisy', '1.jpg')))
    return found


def _images(parent, classes, all_classes=True):
    """`(paths, labels, others)` for `FolderImages`; see there."""
    paths, labels = [], []
    others = [path for path in _shown_in(parent) if is_image(path)]  # of no class
    for label, name in enumerate(classes):
        folder = os.path.join(parent, name)
        inside = _shown_in(folder) if all_classes or os.path.isdir(folder) else []
        found = [path for path in inside if is_image(path)]
        if not found and (all_classes or os.path.isdir(folder)):
            deep = [path for path in inside if os.path.isdir(path)]
            raise DatasetError('The folder %s has no images: expected files %s.%s' % (
                folder, '*' + ', *'.join(_ENDINGS),
                ' Folders within class folders are not looked into, such as %s: move the images '
                'up.' % deep[0] if deep else ''))
        others += sorted(set(inside) - set(found))
        paths += found
        labels += [label] * len(found)
    return paths, labels, others


def _shown_in(folder):
    """Sorted paths of what is in a folder and not hidden by a dot."""
    return [os.path.join(folder, name) for name in names_in(folder) if not name.startswith('.')]


def is_image(path):
    """Whether a path is that of an image by its name. A pipe is none, since reading it would wait
    for ever; a link that leads nowhere is one that cannot be read."""
    return path.lower().endswith(_ENDINGS) and (
        os.path.isfile(path) or not os.path.exists(path))
