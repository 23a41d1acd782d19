"""Writers to be killed: each line of input, `<directory> <sharded: 0 or 1>`, starts one.

Each saves every step into the directory until it is killed. All its variables are as large as the
step. Writers are forked from this process, so that TensorFlow is imported only once. Prints the
process id of each, and then `gone`.
"""

import os
import signal
import sys
import warnings

import tensorflow.compat.v1 as tf

from towers.checkpoint.files import newest_checkpoint
from towers.run.checkpoint_hook import CheckpointHook
from towers.checkpoint.tidy import tidy_directory
from towers.run.run_lock import hold_directory

KEEP = 3


def write(directory, sharded):
    with hold_directory(directory), tf.Graph().as_default():
        newest = newest_checkpoint(directory)
        tidy_directory(directory, newest)
        step = tf.train.get_or_create_global_step()
        with tf.control_dependencies([step]):
            large = [tf.get_variable('large_%d' % i, [500 * 1000], tf.float32,
                                     tf.zeros_initializer()) for i in range(8)]
        train_op = tf.group([tf.assign_add(step, 1)] + [tf.assign_add(variable, tf.ones_like(
            variable)) for variable in large])
        scaffold = tf.train.Scaffold(
            saver=tf.train.Saver(save_relative_paths=True, sharded=sharded))
        creator = tf.train.ChiefSessionCreator(
            scaffold, checkpoint_filename_with_path=newest and newest.prefix)
        hook = CheckpointHook(directory, step, save_steps=1, keep=KEEP, saver=scaffold.saver)
        with tf.train.MonitoredSession(creator, [hook]) as session:
            while True:
                session.run(train_op)


def main():
    for line in sys.stdin:
        directory, sharded = line.split()
        pid = os.fork()
        if pid == 0:
            signal.alarm(120)  # should nobody kill it
            write(directory, sharded == '1')
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print('gone', flush=True)


if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    main()
