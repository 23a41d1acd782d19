"""Trains a model on several devices; with no flags, handwritten digits on 2 towers."""

import contextlib
import os
import signal
import sys

if __name__ == '__main__':
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds; nothing is to be saved
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # saves, where there is something to save

from trainer.command_line import parse_flags  # noqa: E402
from trainer.flags import FLAGS  # noqa: E402
from trainer.output import make_output_lasting  # noqa: E402
from trainer.sweep import sweep  # noqa: E402

if __name__ == '__main__':
    make_output_lasting()
    ARGUMENTS = parse_flags(sys.argv, __doc__)  # before the imports: a typing error is said at once
    if FLAGS.sweep:
        sys.exit(sweep(sys.argv))


def import_quietly():
    """Imports TensorFlow without the lines that its libraries log while they load, unless the user
    has set TF_CPP_MIN_LOG_LEVEL below 3: this program's own lines are the output."""
    if os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3') != '3':
        return
    # The libraries are C++, and write to the file descriptor 2 itself, standard error. Where that
    # is closed, `os.dup` raises an OSError, and there is nothing to be silenced.
    with contextlib.suppress(OSError), open(os.devnull, 'w') as nowhere:
        stderr = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


import_quietly()
import tensorflow.compat.v1 as tf  # noqa: E402
from absl import app  # noqa: E402

import datasets  # noqa: E402
from trainer import training  # noqa: E402
from trainer.arguments import enter_graph_mode, make_cluster, saves, trains  # noqa: E402
from trainer.data import make_dataset  # noqa: E402
from trainer.job import build_job, find_position, make_setup, show  # noqa: E402
from trainer.process import run  # noqa: E402
from trainer.rate_finder import find_rate  # noqa: E402
from trainer.results import evaluate_or_predict  # noqa: E402
from trainer.run_settings import check_classes  # noqa: E402
from trainer.trials import choose_batch_size, diagnose, show_memory  # noqa: E402


def main(unused_argv):
    """Does what --mode says; returns the exit status."""
    enter_graph_mode()
    dataset = make_dataset()
    if FLAGS.mode == 'check_data':
        return 1 if datasets.check_data(dataset, bad_list=FLAGS.bad_examples or None) else 0
    setup = make_setup(dataset)
    if FLAGS.mode == 'train':
        return train(setup)
    if FLAGS.mode in ('eval', 'predict'):
        evaluate_or_predict(setup)
    elif FLAGS.mode == 'memory':
        show_memory(setup)
    elif FLAGS.mode == 'find_rate':
        find_rate(setup)
    else:
        print(diagnose(setup))
    return 0


def train(setup):
    """Trains, or shows the plan alone (--plan_only); returns the exit status.

    In a cluster this process does its own part: the chief trains and saves, a worker trains.
    `setup` is the `Setup` of the job.
    """
    check_classes(setup.dataset)
    if setup.batch_size == 'auto':
        setup = setup._replace(batch_size=choose_batch_size(setup))
    cluster = make_cluster()
    if not trains(cluster):
        return training.serve_or_evaluate(setup, cluster)
    position = find_position(cluster)
    is_chief = saves(cluster)  # or the only process
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        evaluates = is_chief and not FLAGS.plan_only
        job = build_job(setup, position, with_evaluation=evaluates, cluster=cluster)
        if FLAGS.plan_only:
            show(job.built)
            return 0
        if not is_chief:
            return training.work(cluster, job)
        show(job.built)
        return training.train(job, cluster)


if __name__ == '__main__':
    app.run(lambda argv: run(main, argv), flags_parser=lambda unused_argv: ARGUMENTS)
