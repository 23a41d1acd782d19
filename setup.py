"""Packaging of `towers`. The wheel holds that package alone; models/ and datasets/ stay here.

The distribution is `towers-tf1`: the registry has another `towers`, of somebody else.
"""

import io
import os
import re

from setuptools import find_packages, setup

_HERE = os.path.dirname(os.path.abspath(__file__))


def read(path):
    """The text of a file of this repository."""
    with io.open(os.path.join(_HERE, path), encoding='utf-8') as text_file:
        return text_file.read()


# `tf.layers` from TensorFlow 2.16 on: tf-keras of the TensorFlow that is there. An extra a version,
# as nothing in a requirement can say "of that which is installed", and pip would upgrade TensorFlow
# for the newest tf-keras.
TF_LAYERS = {'tf-layers-2.%d' % minor: ['tf-keras==2.%d.*' % minor, 'tensorflow==2.%d.*' % minor]
             for minor in range(16, 22)}

setup(
    name='towers-tf1',
    # Read, not imported: towers imports TensorFlow, which may not be there yet.
    version=re.search(r"^__version__ = '(.+)'$", read('towers/__init__.py'), re.M).group(1),
    description='Synchronous data-parallel training for TensorFlow 1 graphs: '
                'one call from a model function to a multi-device train op',
    long_description=read('README.md'),
    long_description_content_type='text/markdown',
    author='the towers authors',
    license='Apache-2.0',
    keywords='tensorflow graph-mode data-parallel multi-gpu tower gradient',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Developers',
        'Intended Audience :: Science/Research',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.7',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['towers', 'towers.*']),
    package_data={'towers': ['py.typed'], 'towers.report': ['page.html', 'page.css', 'page.js']},
    # No supported TensorFlow installs on Python 3.8: those before 2.15 are not tried.
    python_requires='>=3.7,!=3.8.*',
    # On Python 3.7 these keep an installed TensorFlow 1.15, with the last protobuf that it can
    # import. tf-keras is left out on purpose: requiring it makes pip upgrade TensorFlow.
    install_requires=[
        'tf-slim==1.1.0',
        'numpy',
        'absl-py',
        'tqdm',
        'tensorflow>=1.15,<2; python_version<"3.8"',
        'protobuf>=3.8,<3.21; python_version<"3.8"',
        'tensorflow>=2.15,<2.22; python_version>="3.9"',
    ],
    extras_require=dict(TF_LAYERS, **{
        'test': ['pytest', 'pytest-xdist>=3'],
        'lint': ['ruff>=0.12; python_version>="3.9"', 'mypy>=1.18; python_version>="3.9"'],
        'plots': ['matplotlib'],  # pictures of the benchmarks and of memory (`memory_report`)
        'tensorboard': ['tensorboard'],  # TensorFlow brings it along before 2.21 only
        # CUDA's libraries. TensorFlow 1.15.5 with CUDA is another package, tensorflow-gpu, and
        # wants CUDA 10.0 from elsewhere: docs/install.md.
        'gpu': ['tensorflow[and-cuda]; python_version>="3.9" and sys_platform=="linux"'],
        'horovod': ['horovod==0.28.1'],  # builds for TensorFlow 1.15 to 2.18
        'docs': ['mkdocs-material>=9.6,<10; python_version>="3.9"',
                 'mkdocstrings-python>=1.16,<3; python_version>="3.9"',
                 'ruff>=0.12; python_version>="3.9"'],  # it wraps signatures
    }),
)
