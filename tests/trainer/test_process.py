"""trainer.process: the exit status of a program."""

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer.flags import FLAGS
from trainer.process import run


@pytest.fixture
def parsed():
    with flagsaver.flagsaver():
        FLAGS(['train.py'])
        yield


def raises(error):
    def main(unused_argv):
        raise error
    return main


@pytest.mark.parametrize('error, status, said', [
    (towers.CheckpointError('damaged'), 1, 'damaged'),
    (datasets.BadExampleError('a.jpg is empty'), 1, 'a.jpg is empty'),
    (towers.InputError('the test set has no batch'), 1, 'the test set has no batch'),
    (towers.InvalidArgumentError("precision='fp9': expected\none"), 2,
     '--precision=fp9: expected one'),
    (tf.errors.ResourceExhaustedError(None, None, 'OOM when allocating tensor with shape[3,4] and'),
     1, 'there is not enough memory: OOM when allocating tensor with shape[3,4]. Give a smaller '
     '--batch_size or --image_size, or more towers on other devices.'),
    (KeyboardInterrupt(), 130, None)])
def test_a_users_mistake_is_one_line(error, status, said, parsed, capsys):
    if status == 2:
        with pytest.raises(SystemExit) as ended_with:
            run(raises(error), [])
        assert ended_with.value.code == 2
    else:
        assert run(raises(error), []) == status
    out, err = capsys.readouterr()
    assert (out, err) == ('', '' if said is None else 'train.py: %s\n' % said)


def test_other_errors_come_through(parsed):
    for error in (KeyError('w'), tf.errors.InternalError(None, None, 'of the model')):
        with pytest.raises(type(error)) as caught:
            run(raises(error), [])
        assert caught.value is error
