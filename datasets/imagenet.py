"""ImageNet (ILSVRC 2012) from TFRecords as slim's and TPU's conversion scripts write them.

A folder holds train-* and validation-*, with the features `image/encoded` (JPEG) and
`image/class/label` (1 .. 1000; 0 is the background class of the 1001).
"""

from datasets.image_records import record_splits
from datasets.image_set import ImageSet

NUM_CLASSES = 1001


def imagenet(data_dir, **options):
    """The data set in a folder. Made in seconds (warm) to minutes (cold disk) for all 1.28 million
    images, since the places of all records are looked up.

    Args:
      data_dir: the folder with the files train-* and validation-*.
      **options: of `ImageSet`: `augment`, `bad_list`.

    Raises:
      DatasetError: the folder is missing, or its files are missing, damaged or empty.
    """
    return ImageSet('imagenet', record_splits(data_dir), NUM_CLASSES, **options)
