"""A tiny ImageNet in TFRecords, for tests."""

import numpy as np
import tensorflow.compat.v1 as tf

TRAIN, TEST = 7, 5


def jpeg(session, number, height, width):
    """A gray ramp from left to right around a level that tells the images apart."""
    image = np.full([height, width, 3], 30 * number + 20, np.uint8)
    image[:, :, 1] = np.linspace(0, 255, width).astype(np.uint8)
    return session.run(tf.image.encode_jpeg(image, quality=100))


def example(encoded, label):
    return tf.train.Example(features=tf.train.Features(feature={
        'image/encoded': tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        'image/class/label': tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        'image/format': tf.train.Feature(bytes_list=tf.train.BytesList(value=[b'JPEG'])),
    })).SerializeToString()


def write_imagenet(folder, train=TRAIN, test=TEST, label=lambda number: number + 1):
    """Training images in two files, test images in one; labels from 1 on."""
    with tf.Graph().as_default(), tf.Session() as session:
        for name, numbers in (('train-00000-of-00002', range(3)),
                              ('train-00001-of-00002', range(3, train)),
                              ('validation-00000-of-00001', range(test))):
            with tf.io.TFRecordWriter(str(folder / name)) as writer:
                for number in numbers:
                    writer.write(example(jpeg(session, number, 20 + number, 40 - number),
                                         label(number)))
    return str(folder)
