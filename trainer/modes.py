"""What train.py does besides training: evaluates, predicts, diagnoses, measures memory."""

import tensorflow.compat.v1 as tf

from trainer.data import test_numbers
from trainer.flags import FLAGS
from trainer.job import make_evaluation, show
from trainer.results import evaluate, export, newest_or_refuse, predict
from trainer.resuming import check_classes
from trainer.trials import diagnose, show_memory


def run_mode(setup):
    """Does what --mode says, which is not to train; returns the exit status.

    Args:
      setup: `Setup`.
    """
    if FLAGS.mode == 'memory':
        show_memory(setup)
    elif FLAGS.mode == 'diagnose':
        print(diagnose(setup))
    else:
        check_classes(setup.dataset)
        evaluate_or_predict(setup)
    return 0


def evaluate_or_predict(setup):
    """Shows the plan of an evaluation; unless --plan_only, evaluates or predicts (--mode), and
    exports."""
    if not FLAGS.plan_only:
        newest_or_refuse()  # before a network is built for nothing
    with tf.Graph().as_default():
        tf.set_random_seed(FLAGS.seed)
        evaluation = make_evaluation(setup, mode='eval' if FLAGS.mode == 'eval' else 'infer')
        show(evaluation.built)
        if not FLAGS.plan_only:
            if FLAGS.mode == 'eval':
                evaluate(evaluation, setup)
            else:
                predict(evaluation, test_numbers(setup.dataset), setup.model.unit)
    if FLAGS.export_dir and not FLAGS.plan_only:
        export(setup.model)
