"""Hooks of the user's own, `--hooks=module:function`; see docs/own_model.md.

    def hooks(run):                              # reviews.py, in the folder of the run or installed
        return [EarlyWarning(run.built.loss, run.global_step)]

The function is called once, when the graph of a training is built, by the process that saves. It
may make operations. The hooks come before the one that evaluates and the one that saves. A hook
with a method `evaluated(step, results, seconds)` gets the results of each evaluation, as
`towers.EvaluationHook` calls it. Summaries that the function makes are written with the others.
"""

import typing

import tensorflow.compat.v1 as tf

import towers
from datasets.errors import OwnModelError
from datasets.own_code import calling, own_function, takes
from trainer.flags import FLAGS, SETTINGS, train_dir
from trainer.job import Job


class Run(typing.NamedTuple):
    """What a function of --hooks is called with."""
    built: towers.BuiltTowers  # its `loss` and the like are tensors of a step
    learning_rate: tf.Tensor  # float32 scalar
    global_step: tf.Variable  # steps done
    examples_seen: tf.Variable  # examples of all steps done
    last_step: int  # with which the run ends
    train_dir: str  # folder of the run
    settings: typing.Dict[str, typing.Any]  # values of all flags and options, by name


class OwnHooks(typing.NamedTuple):
    """What a function of --hooks has made."""
    hooks: typing.List[tf.train.SessionRunHook]
    summaries: typing.List[tf.Tensor]  # by `tf.summary.scalar` and the like


def make_own_hooks(job: Job) -> OwnHooks:
    """What the function of --hooks makes for a job; nothing without that flag.

    Raises:
      InvalidArgumentError: there is no such function, or it returned something else.
      OwnModelError: it raised an error.
    """
    name = FLAGS.hooks
    if not name:
        return OwnHooks([], [])
    function = own_function(name, 'hooks', OwnModelError,
                            'reviews:hooks for the function hooks of reviews.py')
    if not takes(function, None):
        raise towers.InvalidArgumentError('--hooks=%s cannot be called with one argument: expected '
                                          'a function of the run.' % name)
    run = Run(job.built, job.learning_rate, job.counts.global_step, job.counts.examples,
              job.counts.last_step, train_dir(), {each: FLAGS[each].value for each in SETTINGS})
    summaries = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
    num_before = len(summaries)
    with calling(name, name.partition(':')[2], 'hooks', OwnModelError):
        hooks = function(run)
    if not isinstance(hooks, (list, tuple)) or not all(
            isinstance(hook, tf.train.SessionRunHook) for hook in hooks):
        raise towers.InvalidArgumentError(
            '--hooks=%s returned %.80r: expected a list of tf.train.SessionRunHook.' % (
                name, hooks))
    return OwnHooks(list(hooks), summaries[num_before:])
