"""A folder of class folders of JPEG and PNG files: train/<class>/*.jpg, test/<class>/*.jpg.

Classes are numbered from 0 in the order of their names, those of the training images for all.
Without a folder `train`, the class folders stand in the folder itself, and every fifth image of
each class, from the first on, is a test image.
"""

import os

import numpy as np

from datasets.damages import NO_IMAGES, Damage
from datasets.errors import DatasetError
from datasets.folders import names_in, no_folder

_ENDINGS = ('.jpg', '.jpeg', '.png')
_TEST_NAMES = ('test', 'validation', 'val')
_TEST_EVERY = 5


class FolderImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, paths, labels, damages=(), others=()):
        """
        Args:
          paths, labels: of the images.
          damages: what is wrong with whole classes, as `Damage`s.
          others: paths of what is left alone: in the class folders what is no JPEG or PNG by its
            name, and folders; beside them, images, and further folders of test images.
        """
        self.others = list(others)
        self.paths, self.labels = paths, np.asarray(labels, np.int64)
        self.damages = list(damages)

    def __len__(self):
        return len(self.paths)

    def where(self, number):
        """The path of an image."""
        return self.paths[number]

    def names(self):
        """What images are numbered by: list of class folders and files, `daisy/1.jpg`."""
        return ['/'.join(path.split(os.sep)[-2:]) for path in self.paths]

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
      DatasetError: there is no such folder, it or that of a split cannot be read, it has no class
        folders, no class has images, or the test images have a class that the training images lack.
    """
    if not os.path.isdir(data_dir):
        raise DatasetError('%s: expected one with a folder of images for each '
                           'class, or with train and test that have those.' % no_folder(data_dir))
    names_in(data_dir)  # where that is not allowed, nothing seems to be in it
    train = os.path.join(data_dir, 'train')
    if not os.path.isdir(train):
        classes = _folders(data_dir)
        paths, labels, damages, others = _images(data_dir, classes)
        is_test = np.zeros(len(paths), bool)
        for label in range(len(classes)):
            of_class = np.flatnonzero(np.asarray(labels) == label)
            if len(of_class) > 1:  # a class of one image has to be learned before it is tested
                is_test[of_class[::_TEST_EVERY]] = True
        if not is_test.any():
            raise DatasetError('%s has one image a class, which is to train on, so that nothing is '
                               'left to test on: add images, or make folders train and test.'
                               % data_dir)
        return classes, {split: FolderImages([path for path, test in zip(paths, is_test)
                                              if test == wanted],
                                             np.asarray(labels)[is_test == wanted],
                                             () if wanted else damages, () if wanted else others)
                         for split, wanted in (('train', False), ('test', True))}
    classes = _folders(train)
    tests = [os.path.join(data_dir, name) for name in _TEST_NAMES
             if os.path.isdir(os.path.join(data_dir, name))]
    test = tests[0] if tests else None
    if test is None:
        raise DatasetError(
            '%s has a folder train, but none named %s: make one, with class folders of the images '
            'to test on, or move the class folders out of train: without it, every fifth image is '
            'for testing.' % (data_dir, ' or '.join(_TEST_NAMES)))
    unknown = sorted(set(_folders(test)) - set(classes))
    if unknown:
        raise DatasetError(
            '%s has a class %r that %s does not have: give the folder the name of a class, move it '
            'away, or add images of it to train on.' % (test, unknown[0], train))
    found = {'train': FolderImages(*_images(train, classes)),
             'test': FolderImages(*_images(test, classes, all_classes=False))}
    found['test'].others += tests[1:]
    return classes, found


def is_test_folder(path):
    """Whether a path is by its name that of a folder of the class folders to test on."""
    return os.path.basename(path) in _TEST_NAMES


def is_image(path):
    """Whether a path is that of an image by its name."""
    return path.lower().endswith(_ENDINGS)


def is_special(path):
    """Whether a path leads to a folder, a pipe, a device: reading a pipe would wait for ever.

    A link that leads nowhere does not: it is an image that cannot be read.
    """
    return os.path.exists(path) and not os.path.isfile(path)


def _folders(parent):
    found = [name for name in names_in(parent)
             if os.path.isdir(os.path.join(parent, name)) and not name.startswith('.')]
    if not found:
        raise DatasetError(
            '%s has no folders: expected one for each class, with its images: move each image into '
            'one, such as %s.' % (parent, os.path.join(parent, 'daisy', '1.jpg')))
    return found


def _images(parent, classes, all_classes=True):
    """The arguments of `FolderImages`.

    A class without images is a damage, unless it may be missing, and so is one that cannot be read.
    """
    paths, labels, damages, closed = [], [], [], []
    others = [path for path in _shown_in(parent)
              if is_image(path) and os.path.isfile(path)]  # of no class
    for label, name in enumerate(classes):
        folder = os.path.join(parent, name)
        try:
            inside = _shown_in(folder) if os.path.isdir(folder) else []
        except DatasetError as error:
            closed.append(Damage(str(error)))
            continue
        found = [path for path in inside
                 if is_image(path) and not is_special(path)]
        taken = set(found)
        others += [path for path in inside if path not in taken]
        if not found and (all_classes or os.path.isdir(folder)):
            damages.append(Damage(NO_IMAGES % (folder, '*' + ', *'.join(_ENDINGS))
                                  + _too_deep(inside)))
        paths += found
        labels += [label] * len(found)
    damages = closed + damages
    if not paths:
        raise DatasetError(damages[0].text if closed or len(damages) == 1 else
                           'The class folders of %s have no images: expected files %s.%s' % (
                               parent, '*' + ', *'.join(_ENDINGS), _too_deep(others)))
    return paths, labels, damages, others


def _shown_in(folder):
    """Sorted paths of what is in a folder and not hidden by a dot."""
    return [os.path.join(folder, name) for name in names_in(folder) if not name.startswith('.')]


def _too_deep(paths):
    """What to say of the folders among paths within class folders without images, if any."""
    folders = [path for path in paths if os.path.isdir(path)]
    return folders and (' Folders within class folders are not looked into, such as %s: move the '
                        'images up.' % folders[0]) or ''
