"""Small JPEGs and PNGs, good and bad, for tests; made once a process."""

import functools
import os
import struct

import numpy as np
import tensorflow.compat.v1 as tf


@functools.lru_cache(maxsize=None)
def jpeg(level=100, height=20, width=30, channels=3, encode=tf.image.encode_jpeg):
    """A JPEG whose left side is dark and whose right side is of this level."""
    image = np.zeros([height, width, channels], np.uint8)
    image[:, width // 2:] = level
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(encode(image))


def png(*level_and_sizes, **options):
    return jpeg(*level_and_sizes, encode=tf.image.encode_png, **options)


def cmyk():
    """A CMYK JPEG of 8 x 8 pixels: a gray one's tables, and four components of one flat block."""
    gray = jpeg(128, 8, 8, 1)
    frame = gray.index(b'\xff\xc0')
    scan = gray.index(b'\xff\xda')
    tables = gray[frame + 2 + struct.unpack('>H', gray[frame + 2:frame + 4])[0]:scan]
    components = [bytes([number]) for number in (1, 2, 3, 4)]
    return (gray[:frame]
            + b'\xff\xc0' + struct.pack('>HBHHB', 20, 8, 8, 8, 4)
            + b''.join(each + b'\x11\x00' for each in components) + tables
            + b'\xff\xda' + struct.pack('>HB', 14, 4)
            + b''.join(each + b'\x00' for each in components) + b'\x00\x3f\x00'
            # Each block: a difference of 0 (00), and the end of the block (1010).
            + b'\x28\xa2\x8a' + b'\xff\xd9')


def record(encoded, label, **others):
    features = {'image/encoded': tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
                'image/class/label': tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))}
    features.update(others)
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_records(path, examples):
    """A TFRecord file of `(encoded, label)` pairs."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for encoded, label in examples:
            writer.write(record(encoded, label))


def write_imagenet(folder, test=5, label=lambda number: number + 1):
    """A tiny ImageNet: seven training images in two files, test images in one."""
    for name, numbers in (('train-00000-of-00002', range(3)), ('train-00001-of-00002', range(3, 7)),
                          ('validation-00000-of-00001', range(test))):
        write_records(folder / name, [
            (jpeg(30 * number + 20, 20 + number, 40 - number), label(number))
            for number in numbers])
    return str(folder)


def write_folder(folder, images):
    """Files of a dict from names, 'train/cat/1.jpg', to contents."""
    for name, content in images.items():
        path = os.path.join(str(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'wb') as image:
            image.write(content)
    return str(folder)


def batches(dataset, count=None):
    """The first batches of a `tf.data.Dataset`, or all."""
    iterator = tf.data.make_initializable_iterator(dataset)
    following, found = iterator.get_next(), []
    with tf.Session() as session:
        session.run(iterator.initializer)
        while count is None or len(found) < count:
            try:
                found.append(session.run(following))
            except tf.errors.OutOfRangeError:
                break
    return found
