"""The JPEG pipeline against decoding alone; a step on its images against one on synthetic data.

    python -m benchmarks.input_pipeline [--seconds=10] [--images=256] [--image_size=224]
                                        [--rounds=3]

The set is made of generated images, sized like ImageNet's (500 x 375, about 100 kB), in TFRecords
in a temporary folder. Rates are of the same processors, in turns, medians over the rounds:

    decode    read from memory, decode_and_crop_jpeg of the same windows, resize: a parallel map
              over the same bytes with nothing else, batched
    records   the same, from the same files by TensorFlow's TFRecordDataset, in their order
    pipeline  datasets.ImageSet with the same windows (--augment=crop), batched
    full      the same with colour distortion (--augment=inception)
    slim      tf_slim's DatasetDataProvider with the same decoding, where it runs
    step      a step of a small convolutional net on the pipeline's batches, and on one in memory:
              both need the same processors
    waiting   the same of a step that takes twice as long as its input and no processor, as a step
              of an accelerator does
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
from datasets.epochs import Epochs  # noqa: E402
from datasets.image_set import _draws  # noqa: E402
from datasets.pipeline import epoch_order  # noqa: E402
import towers  # noqa: E402

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
    encoded = np.array([dataset._sources['train'].image(number)[0] for number in range(count)],
                       object)
    order = epoch_order(count, 1)
    with tf.device('/cpu:0'):
        everything = tf.constant(encoded)

        def example(epoch, number):
            return _cropped(everything[number], _draws(1, epoch, number, count), image_size)
        return Epochs(count, BATCH).batches(
            lambda epoch: (tf.fill([count], epoch), order(epoch)), 0, example).prefetch(2)


def read_and_decode(dataset, folder, image_size):
    """As `decode_alone`, by TensorFlow's reader."""
    count = dataset.num_examples['train']

    def example(number, record):
        data = tf.io.parse_single_example(
            record, {'image/encoded': tf.FixedLenFeature([], tf.string)})['image/encoded']
        return _cropped(data, _draws(1, number // count, number % count, count), image_size)
    with tf.device('/cpu:0'):
        records = tf.data.TFRecordDataset(os.path.join(folder, 'train-00000-of-00001')).repeat()
        numbered = tf.data.Dataset.zip((tf.data.Dataset.range(2 ** 62), records))
        return numbered.map(example, tf.data.experimental.AUTOTUNE).batch(
            BATCH, drop_remainder=True).prefetch(2)


def _cropped(data, draws, image_size):
    size = tf.cast(tf.image.extract_jpeg_shape(data)[:2], tf.float32)
    window = tf.cast(preprocessing.random_window(draws, size[0], size[1]), tf.int32)
    pixels = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    return tf.raw_ops.ResizeBilinear(images=pixels[tf.newaxis], size=[image_size, image_size],
                                     half_pixel_centers=True)[0]


class Rate:
    """A pipeline, or a step on its batches, whose rate is taken in turns with others'."""

    def __init__(self, make, model_fn=None):
        graph, config = tf.Graph(), None
        with graph.as_default():
            iterator = tf.data.make_initializable_iterator(make())
            batch = iterator.get_next()
            self._step = tf.group(*[part.op for part in tf.nest.flatten(batch)])
            if model_fn is not None:
                built = towers.build_towers(model_fn, batch,
                                            tf.train.GradientDescentOptimizer(.01), 2)
                self._step, config = built.train_op, towers.session_config(built.devices)
            begin = tf.group(iterator.initializer, tf.global_variables_initializer())
        self._session = tf.Session(graph=graph, config=config)
        self._session.run(begin)
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


def slim_provider(folder, image_size):
    """Images a second of tf_slim's data provider with the same crop; None where it fails."""
    try:
        towers.mend_slim()
        import tf_slim as slim
        with tf.Graph().as_default():
            features = {'image/encoded': tf.FixedLenFeature((), tf.string),
                        'image/format': tf.FixedLenFeature((), tf.string, default_value='jpeg'),
                        'image/class/label': tf.FixedLenFeature([], tf.int64)}
            decoder = slim.tfexample_decoder.TFExampleDecoder(features, {
                'image': slim.tfexample_decoder.Image('image/encoded', 'image/format'),
                'label': slim.tfexample_decoder.Tensor('image/class/label')})
            source = slim.dataset.Dataset(os.path.join(folder, 'train-*'), tf.TFRecordReader,
                                          decoder, 256, {})
            provider = slim.dataset_data_provider.DatasetDataProvider(
                source, num_readers=2, common_queue_capacity=64, common_queue_min=32)
            image, label = provider.get(['image', 'label'])
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                tf.shape(image), tf.zeros([1, 0, 4]), min_object_covered=.1,
                aspect_ratio_range=[.75, 4 / 3], area_range=[.05, 1.],
                use_image_if_no_bounding_boxes=True)
            image = tf.image.resize_images(tf.slice(image, begin, size), [image_size, image_size])
            image.set_shape([image_size, image_size, 3])
            batch = tf.train.batch([image, label], BATCH, num_threads=2, capacity=2 * BATCH)
            step = tf.group(*[part.op for part in batch])
            with tf.train.MonitoredSession() as session:
                for _ in range(4):
                    session.run(step)
                begin_time, steps = time.perf_counter(), 0
                while time.perf_counter() - begin_time < 6:
                    session.run(step)
                    steps += 1
                return steps * BATCH / (time.perf_counter() - begin_time)
    except Exception as error:  # of any kind, in code that is not ours
        print('slim           does not run here: %s' % str(error).split('\n')[0][:80])
        return None


def small_net(images, labels):
    """Four convolutions, so that a step takes about twice as long as its input."""
    for index, width in enumerate((16, 32, 32, 32)):
        kernel = tf.get_variable('kernel%d' % index, [3, 3, images.shape[-1], width],
                                 initializer=tf.random_normal_initializer(stddev=.1, seed=index))
        stride = 2 if index else 1
        images = tf.nn.relu(tf.nn.conv2d(images, kernel, [1, stride, stride, 1], 'SAME'))
    weights = tf.get_variable('weights', [32, 1001], initializer=tf.zeros_initializer())
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=tf.matmul(tf.reduce_mean(images, [1, 2]), weights)))


def waiting_net(seconds):
    """A model whose forward pass waits, as for an accelerator, so long on each tower."""
    def wait(images):
        time.sleep(seconds)
        return images

    def model_fn(images, labels):
        waited = tf.numpy_function(wait, [images[0, 0, 0]], tf.float32)
        weight = tf.get_variable('weight', [], initializer=tf.zeros_initializer())
        return weight * tf.reduce_mean(tf.reshape(waited, [-1])) + 0. * tf.cast(
            tf.reduce_sum(labels), tf.float32)
    return model_fn


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

        def batches(augment, size=options.image_size):
            return datasets.get_dataset('imagenet', folder, augment=augment).train_batches(
                batch_size=BATCH, seed=1, image_size=size)
        pipelines = [('decode', Rate(lambda: decode_alone(
            datasets.get_dataset('imagenet', folder), options.image_size))),
                     ('records', Rate(lambda: read_and_decode(
                         datasets.get_dataset('imagenet', folder), folder, options.image_size))),
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
        found = slim_provider(folder, options.image_size)
        if found:
            print('slim           %6.0f images/s' % found)

        def held():
            return batches('crop').take(1).cache().repeat()
        for kind, model_fn in (('step', small_net),
                               ('waiting', waiting_net(2. * BATCH / pipelines[2][1].rate))):
            steps = [(name, Rate(make, model_fn))
                     for name, make in (('memory', held), ('pipeline', lambda: batches('crop')))]
            for _ in range(options.rounds):
                for _, each in steps:
                    each.measure(options.seconds / options.rounds)
            for name, each in steps:
                print('%-7s %-10s %6.0f images/s, %.3f of the one from memory' % (
                    kind, name, each.rate, each.rate / steps[0][1].rate))
    print('memory         %.0f MB, the most of this process' % (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3))


if __name__ == '__main__':
    main()
