"""The handwritten digits by `fit` of a Keras model, on several devices.

    python -m examples.keras_fit --devices=2 --epochs=10

    -model.fit(images, labels)
    +towers.ParallelModel(model, 2).fit(images, labels)

On TF 1.15 and 2.15 by tf.keras, on TF 2.16 and later by the package tf-keras (`pip install
'.[tf-layers-2.21]'`, the extra of your TensorFlow).
"""

import argparse
import importlib.util
import os
import sys

if importlib.util.find_spec('tf_keras') is not None:
    os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')  # before tf.keras is first used

import numpy as np  # noqa: E402
import tensorflow  # noqa: E402
import tensorflow.compat.v1 as tf  # noqa: E402

import towers  # noqa: E402
from datasets.digits import load_digits  # noqa: E402

keras = tensorflow.keras


def make_model():
    """A small convolution net: images [batch, 8, 8, 1] to probabilities [batch, 10]."""
    return keras.Sequential([
        keras.layers.Conv2D(32, 3, padding='same', activation='relu', input_shape=(8, 8, 1)),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation='relu'),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, activation='softmax')])


def main(arguments):
    """Trains, prints the accuracy on the test images, and saves the model."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--devices', type=int, default=2)
    parser.add_argument('--epochs', type=int, default=10)
    parser.add_argument('--batch_size', type=int, default=64)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--save', default='', help='a file to save the model to, .h5')
    options = parser.parse_args(arguments)
    np.random.seed(options.seed)
    tf.set_random_seed(options.seed)
    try:
        with tf.Session(config=towers.session_config(options.devices)).as_default():
            model = towers.ParallelModel(make_model(), devices=options.devices)
            print(model.plan)
            model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
            model.fit(*load_digits('train'), batch_size=options.batch_size, epochs=options.epochs,
                      verbose=2)
            _, accuracy = model.evaluate(*load_digits('test'), verbose=0)
            print('test accuracy: %.4f' % accuracy)
            if options.save:
                model.save(options.save)
    except towers.TowersError as error:
        sys.exit(str(error))


if __name__ == '__main__':
    tf.disable_v2_behavior()  # for the whole process, so not where the module is imported
    main(sys.argv[1:])
