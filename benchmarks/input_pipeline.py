"""The JPEG pipeline against decoding alone.

    python -m benchmarks.input_pipeline [--seconds=10] [--images=256] [--image_size=224]
                                        [--rounds=3]

The set is made of generated images, sized like ImageNet's (500 x 375, about 100 kB), in TFRecords
in a temporary folder. Rates are of the same processors, in turns, medians over the rounds:

    decode    read from memory, decode_and_crop_jpeg of the same windows, resize: a parallel map
              over the same bytes with nothing else, batched
    records   the same, from the same files by TensorFlow's TFRecordDataset, in their order
    pipeline  datasets.ImageSet with the same windows (--augment=crop), batched
    full      the same with colour distortion (--augment=inception)
"""

import argparse
import os
import resource
import tempfile
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import datasets  # noqa: E402
from datasets import preprocessing  # noqa: E402
from datasets.epochs import Epochs, epoch_order  # noqa: E402

HEIGHT, WIDTH, QUALITY = 375, 500, 96
BATCH = 32


def write_set(folder, count):
    """TFRecords of images with the structure of photographs: smooth shapes, edges, some noise."""
    rng = np.random.RandomState(1)
    sizes = []
    with tf.Graph().as_default(), tf.Session() as session:
        pixels = tf.placeholder(tf.uint8, [HEIGHT, WIDTH, 3])
        encode = tf.image.encode_jpeg(pixels, quality=QUALITY)
        for split, number in (('train', count), ('validation', BATCH)):
            with tf.io.TFRecordWriter(os.path.join(folder, split + '-00000-of-00001')) as writer:
                for index in range(number):
                    encoded = session.run(encode, {pixels: _image(rng)})
                    sizes.append(len(encoded))
                    writer.write(tf.train.Example(features=tf.train.Features(feature={
                        'image/encoded': tf.train.Feature(
                            bytes_list=tf.train.BytesList(value=[encoded])),
                        'image/class/label': tf.train.Feature(
                            int64_list=tf.train.Int64List(value=[1 + index % 1000])),
                    })).SerializeToString())
    return np.mean(sizes)


def _image(rng):
    rows, columns = np.mgrid[:HEIGHT, :WIDTH] / 50.
    image = np.zeros([HEIGHT, WIDTH, 3])
    for _ in range(6):
        a, b, c = rng.uniform(-3, 3, 3)
        image += np.sin(a * rows + b * columns + c)[..., np.newaxis] * rng.uniform(0, 30, 3)
    top, left = rng.randint(HEIGHT // 2), rng.randint(WIDTH // 2)
    image[top:top + HEIGHT // 3, left:left + WIDTH // 3] += rng.uniform(-60, 60, 3)
    return np.clip(image + 128 + rng.normal(0, 9, image.shape), 0, 255).astype(np.uint8)


def decode_alone(dataset, image_size):
    """The same bytes, windows and sizes, by a map over a tensor of encoded images."""
    count = dataset.num_examples['train']
    encoded = np.array([dataset.sources['train'].image(number)[0] for number in range(count)],
                       object)
    order = epoch_order(count, 1)
    with tf.device('/cpu:0'):
        everything = tf.constant(encoded)

        def example(epoch, number):
            return _cropped(everything[number], epoch * count + number, image_size)
        return Epochs(count, BATCH).batches(
            lambda epoch: (tf.fill([count], epoch), order(epoch)), example=example).prefetch(2)


def read_and_decode(folder, image_size):
    """As `decode_alone`, by TensorFlow's reader."""
    def example(number, record):
        data = tf.io.parse_single_example(
            record, {'image/encoded': tf.FixedLenFeature([], tf.string)})['image/encoded']
        return _cropped(data, number, image_size)
    with tf.device('/cpu:0'):
        records = tf.data.TFRecordDataset(os.path.join(folder, 'train-00000-of-00001')).repeat()
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(2 ** 62), records))
        return numbered.map(example, tf.data.experimental.AUTOTUNE).batch(
            BATCH, drop_remainder=True).prefetch(2)


def _cropped(data, number, image_size):
    draws = tf.random.stateless_uniform([preprocessing.TRAIN_DRAWS],
                                        seed=tf.stack([tf.constant(1, tf.int64), number]))
    size = tf.cast(tf.image.extract_jpeg_shape(data)[:2], tf.float32)
    window = tf.cast(preprocessing.random_window(draws, size[0], size[1]), tf.int32)
    pixels = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    return tf.raw_ops.ResizeBilinear(images=pixels[tf.newaxis], size=[image_size, image_size],
                                     half_pixel_centers=True)[0]


class Rate:
    """A pipeline, whose rate is taken in turns with others'."""

    def __init__(self, make):
        with tf.Graph().as_default() as graph:
            iterator = tf.data.make_initializable_iterator(make())
            self._step = tf.group(*[part.op for part in tf.nest.flatten(iterator.get_next())])
        self._session = tf.Session(graph=graph)
        self._session.run(iterator.initializer)
        self.rates, self.costs = [], []
        for _ in range(4):
            self._session.run(self._step)

    def measure(self, seconds):
        self._session.run(self._step)
        self._session.run(self._step)
        self._session.run(self._step)  # what was made ahead while others had their turn
        begin, used, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < seconds:
            self._session.run(self._step)
            steps += 1
        self.rates.append(steps * BATCH / (time.perf_counter() - begin))
        self.costs.append((time.process_time() - used) / (steps * BATCH))

    @property
    def rate(self):
        return float(np.median(self.rates))

    @property
    def cost(self):
        """Processor seconds an image, which other programs change less than the rate."""
        return float(np.median(self.costs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    for name, value in (('--seconds', 10.), ('--images', 256), ('--image_size', 224),
                        ('--rounds', 3)):
        parser.add_argument(name, type=type(value), default=value)
    options = parser.parse_args()
    tf.disable_v2_behavior()
    with tempfile.TemporaryDirectory() as folder:
        print('set            %d images of %d x %d, %.0f kB each' % (
            options.images, WIDTH, HEIGHT, write_set(folder, options.images) / 1e3))

        def batches(augment):
            return datasets.get_dataset('imagenet', folder, augment=augment).train_batches(
                batch_size=BATCH, seed=1, image_size=options.image_size)
        pipelines = [('decode', Rate(lambda: decode_alone(
            datasets.get_dataset('imagenet', folder), options.image_size))),
                     ('records', Rate(lambda: read_and_decode(
                         folder, options.image_size))),
                     ('pipeline', Rate(lambda: batches('crop'))),
                     ('full', Rate(lambda: batches('inception')))]
        for _ in range(options.rounds):
            for _, each in pipelines:
                each.measure(options.seconds / options.rounds)
        first = pipelines[0][1]
        for name, each in pipelines:
            print('%-14s %6.0f images/s, %.3f of decoding alone (%s); %.3g ms of processor time an '
                  'image, %.3f of it' % (
                      name, each.rate, each.rate / first.rate,
                      ' '.join('%.0f' % rate for rate in each.rates), 1e3 * each.cost,
                      first.cost / each.cost))
    print('memory         %.0f MB, the most of this process' % (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3))


if __name__ == '__main__':
    main()
