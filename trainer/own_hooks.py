"""Hooks of the user's own, `--hooks=module:function`; see docs/own_model.md.

    def hooks(run):                              # reviews.py, in the folder of the run or installed
        return [EarlyWarning(run.built.loss, run.global_step)]

The function is called once, when the graph of a training is built, by the process that saves. It
may make operations. Its hooks come before the hook that evaluates and the hook that saves. A hook
with a method `evaluated(step, results, seconds)` gets the results of each evaluation, as
`towers.EvaluationHook` calls it. Summaries that the function makes are written with those of this
program.
"""

import typing

import tensorflow.compat.v1 as tf

import towers
from datasets.errors import OwnModelError
from datasets.own_code import calling, own_function, takes
from trainer.flags import FLAGS, SETTINGS, train_dir
from trainer.job import Job


class Run(typing.NamedTuple):
    """The argument of a function of --hooks.

    Attributes:
      built: the towers; `built.loss` and the like are tensors of a step.
      learning_rate: a float32 scalar.
      global_step: the variable that counts steps.
      examples_seen: the variable that counts the examples of all steps.
      last_step: the step with which the run ends.
      train_dir: the folder of the run.
      settings: the values of all flags and options, by name.
    """
    built: towers.BuiltTowers
    learning_rate: tf.Tensor
    global_step: tf.Variable
    examples_seen: tf.Variable
    last_step: int
    train_dir: str
    settings: typing.Dict[str, typing.Any]


class OwnHooks(typing.NamedTuple):
    """The result of a function of --hooks.

    Attributes:
      hooks: the hooks that it has returned.
      summaries: the summaries that it has made, as by `tf.summary.scalar`.
    """
    hooks: typing.List[tf.train.SessionRunHook]
    summaries: typing.List[tf.Tensor]


def make_own_hooks(job: Job) -> OwnHooks:
    """Calls the function of --hooks for a job; without that flag there are no hooks.

    Raises:
      InvalidArgumentError: there is no such function, or it did not return a list of hooks.
      OwnModelError: the function raised an error.
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
              job.counts.last_step, train_dir(),
              settings={setting: FLAGS[setting].value for setting in SETTINGS})
    # `tf.summary.scalar` and the like add to this collection. It may have summaries of the model.
    summaries = tf.get_collection_ref(tf.GraphKeys.SUMMARIES)
    num_before = len(summaries)
    _, _, function_name = name.partition(':')
    with calling(name, function_name, 'hooks', OwnModelError):
        hooks = function(run)
    is_list = isinstance(hooks, (list, tuple))
    if not is_list or not all(isinstance(hook, tf.train.SessionRunHook) for hook in hooks):
        raise towers.InvalidArgumentError(
            '--hooks=%s returned %.80r: expected a list of tf.train.SessionRunHook.' % (
                name, hooks))
    return OwnHooks(list(hooks), summaries[num_before:])
