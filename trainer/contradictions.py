"""Flags and options that do not go together.

The type and the range of a single value are checked when it is parsed (`flags`). Here are the rules
for several flags together, and for single values with more limits than a type and a range. A rule
is a plain `if` that returns the line with which the program ends: what was given, and what to give.
Flags without effect are refused as well, by the table `_GOES_WITH`: a user who gives a flag wants
its effect. Whatever depends on the data or the model is refused later, by the module that knows it.
Its test is tests/trainer/test_trainer_flags.py.
"""

import json
import math
import os
import typing

from trainer.flags import (
    CLUSTERS,
    DECAYS_BY_RATE,
    DECAYS_OF_WEIGHTS,
    DECAYS_OVER_EPOCHS,
    DECAYS_TO_0,
    FLAGS,
    PATHS,
    SETTINGS,
    profiled_steps,
)


def contradiction(given: typing.Set[str]) -> typing.Optional[str]:
    """The first rule that the flags break.

    Args:
      given: names of the flags and options that were given, on the command line or in a file.

    Returns:
      A line that says what is wrong; None if nothing is.
    """
    for problem_of in _CHECKS:
        text = problem_of(given)
        if text is not None:
            return text
    return None


# Each of the functions `_problem_of_…` returns a line that says what is wrong, or None. The
# functions in `_CHECKS`, at the end, all take the names of the flags that were given; some do not
# need them.

def _problem_of_numbers(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a number that has the type and the range of its flag, but makes no sense; None if
    all is well."""
    del given
    for name in SETTINGS:
        value = FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            return '--%s=%s: expected a finite number' % (name, value)
    # The range of the flag begins at -1, which asks for the network's own decay.
    if FLAGS.batch_norm_decay < 0 and FLAGS.batch_norm_decay != -1:
        return '--batch_norm_decay=%g: expected 0 to 1, or -1' % FLAGS.batch_norm_decay
    return None


def _problem_of_towers(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with the flags about the towers, and about what each of them does
    with its shard; None if all is well."""
    if {'num_towers', 'devices'} <= given:
        return '--num_towers and --devices both say how many towers there are: give one'
    if FLAGS.micro_batches > 1 and FLAGS.accumulate > 1:
        return ('--micro_batches=%d and --accumulate=%d: a pipeline adds up the gradients of its '
                'micro-batches, too: give --micro_batches=%d alone' % (
                    FLAGS.micro_batches, FLAGS.accumulate, FLAGS.micro_batches * FLAGS.accumulate))
    if FLAGS.recompute and not FLAGS.recompute.strip(', '):
        return "--recompute=%s names nothing: give 'auto', or names" % FLAGS.recompute
    return None


def _problem_of_paths(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a path that is no path, is of another machine, or cannot be written to; None if all
    is well."""
    del given
    for name in PATHS:
        path = str(FLAGS[name].value)
        problem = _problem_of_path(name, path)
        if problem is not None:
            return problem
    return None


def _problem_of_path(name: str, path: str) -> typing.Optional[str]:
    """Describes what is wrong with the path `path`, the value of the flag `name`; None if all is
    well."""
    problem = _problem_of_characters(name, path)
    if problem is not None:
        return problem
    if '://' in path:
        return _problem_of_remote_path(name, path)
    return _problem_of_local_path(name, path)


def _problem_of_characters(name: str, path: str) -> typing.Optional[str]:
    """Describes the characters that a path must not have; None if all is well.

    Args:
      name: the name of the flag.
      path: the value of the flag.
    """
    if '\0' in path:
        return '--%s=%a has a NUL in it, as no path has: give another' % (name, path)
    # Python has such characters in the place of bytes that are no UTF-8.
    has_other_bytes = any('\ud800' <= character <= '\udfff' for character in path)
    if has_other_bytes and name in ('train_dir', 'export_dir', 'init_from'):
        return '--%s=%a is no UTF-8, and TensorFlow opens no other names: give another' % (
            name, path)
    return None


def _problem_of_remote_path(name: str, path: str) -> typing.Optional[str]:
    """Describes what is wrong with a path `scheme://…`, which is not of this machine; None if all
    is well.

    Args:
      name: the name of the flag; only --init_from and --export_dir take such paths.
      path: the value of the flag.
    """
    if name == 'data_dir' and ':' in FLAGS.dataset:  # the user's own function reads it
        return None
    if name not in ('export_dir', 'init_from'):
        return ('--%s=%s is no path of this machine, and --init_from and --export_dir alone take '
                'others: give one, such as that where it is mounted' % (name, path))
    import tensorflow.compat.v1 as tf  # only TensorFlow reaches such a path

    from towers.errors import reason_of
    try:
        tf.io.gfile.exists(path)
    except tf.errors.OpError as error:
        return '--%s=%s cannot be reached: %s' % (name, path, reason_of(error))
    return None


def _problem_of_local_path(name: str, path: str) -> typing.Optional[str]:
    """Describes what is wrong with a path of this machine; None if all is well.

    Only --export_dir is looked at: it is written last, after a training of hours.

    Args:
      name: the name of the flag.
      path: the value of the flag.
    """
    if name == 'export_dir' and path and not _may_hold_files(path):
        return '--export_dir=%s cannot be written to: name a folder' % path
    return None


def _may_hold_files(folder: str) -> bool:
    """Whether files can be written into a folder, or into the nearest folder above it that exists.
    """
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):  # ends at '/' at the latest
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def _problem_of_length(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with the length of the run; None if all is well."""
    if {'train_steps', 'train_epochs'} <= given:
        return '--train_steps and --train_epochs both say how long to train: give one'
    if not FLAGS.train_steps and not FLAGS.train_epochs:
        return '--train_steps and --train_epochs are both 0: there is nothing to do'
    return None


def _problem_of_rate(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with the learning rate or the averages; None if all is well."""
    del given
    if FLAGS.base_learning_rate <= 0:
        return '--base_learning_rate=%g: expected more than 0' % FLAGS.base_learning_rate
    # Without --decay_epochs a decay to 0 ends with the run. Any other decay needs --decay_epochs.
    needs_epochs = FLAGS.decay != 'none' and FLAGS.decay not in DECAYS_TO_0
    if needs_epochs and not FLAGS.decay_epochs:
        return '--decay=%s needs --decay_epochs' % FLAGS.decay
    if FLAGS.optimizer == 'lars' and FLAGS.reduction == 'sum':
        return ('--optimizer=lars adds its decay to the gradient of the mean loss, and '
                '--reduction=sum multiplies that by the towers: give --reduction=mean')
    if FLAGS.average_decay == 1:
        return '--average_decay=1 would never follow the weights: give less'
    return None


def _problem_of_end(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with the flags that end the run before its last step; None if all is
    well."""
    del given
    if FLAGS.stop_at_accuracy and not FLAGS.eval_steps:
        return '--stop_at_accuracy is looked at when there is an evaluation: give --eval_steps'
    if FLAGS.stop_after and not (FLAGS.eval_steps and FLAGS.keep_best):
        return '--stop_after counts evaluations by --keep_best: give --keep_best and --eval_steps'
    if FLAGS.stop_after and FLAGS.stop_at_accuracy:
        return '--stop_at_accuracy and --stop_after both say when to stop: give one'
    return None


def _problem_of_profile(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with --profile_steps; None if all is well."""
    del given
    if FLAGS.profile_steps and profiled_steps(FLAGS.profile_steps) is None:
        return ('--profile_steps=%s: expected two steps, the first one above 1 and below the '
                'second, such as 100,105' % FLAGS.profile_steps)
    return None


def _problem_of_automatic_batch(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a flag with which the program does not train, so that --batch_size=auto has no
    batch size to look for; None if all is well."""
    del given
    if FLAGS.batch_size != 'auto':
        return None
    flag = _flag_that_does_not_train()
    if flag is None:
        return None
    return '--batch_size=auto is of training, and %s does not train: give a number' % flag


def _flag_that_does_not_train() -> typing.Optional[str]:
    """The flag that makes the program do something else than train, as text; or None."""
    if FLAGS.plan_only:
        return '--plan_only'
    if FLAGS.mode != 'train':
        return '--mode=%s' % FLAGS.mode
    if FLAGS.job_name:
        return '--job_name=%s' % FLAGS.job_name
    return None


def _problem_of_plan_only(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a flag that has no effect with --plan_only; None if all is well."""
    del given
    if not FLAGS.plan_only:
        return None
    if FLAGS.mode in ('memory', 'diagnose', 'check_data', 'find_rate'):
        return '--mode=%s makes no plan: leave out --plan_only' % FLAGS.mode
    if FLAGS.export_dir:
        return '--plan_only runs nothing, so there is nothing for --export_dir to write'
    return None


def _problem_of_diagnosis(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with --mode=diagnose; None if all is well."""
    del given
    if FLAGS.mode == 'diagnose' and FLAGS.deterministic:
        return ('--mode=diagnose tells the time in a step, which TensorFlow refuses with '
                '--deterministic: leave it out')
    return None


def _problem_of_hooks(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with --hooks; None if all is well."""
    del given
    if FLAGS.hooks and ':' not in FLAGS.hooks:
        return '--hooks=%s: expected module:function' % FLAGS.hooks
    return None


def _problem_of_outputs(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with the name of a file to write; None if all is well."""
    del given
    if FLAGS.mode == 'predict' and not FLAGS.predictions:
        return '--predictions is empty: name a file to write'
    for name in ('confusion', 'rate_plot'):
        path = str(FLAGS[name].value)
        if path and not path.endswith(('.png', '.csv')):
            return '--%s=%s: expected a name that ends in .png or .csv' % (name, path)
    return None


def _problem_of_sweep(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with --sweep; None if all is well."""
    del given
    if FLAGS.sweep and (FLAGS.cluster or FLAGS.plan_only or FLAGS.job_name):
        return ('--sweep starts runs one after the other on this machine: leave out --cluster, '
                '--job_name and --plan_only')
    return None


def _problem_of_cluster(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes what is wrong with --cluster or TF_CONFIG; None if all is well."""
    del given
    if FLAGS.job_name == 'evaluator':  # it joins no cluster
        return None
    config = os.environ.get('TF_CONFIG', '')
    if not FLAGS.cluster:
        return _problem_without_cluster(config)
    if FLAGS.batch_size == 'auto':
        return '--batch_size=auto runs steps of one machine: give a number, with --cluster'
    if not FLAGS.synchronous and FLAGS.remainder != 'carry':
        return ('--remainder=%s needs steps that all workers take together, and '
                'asynchronously each takes its own' % FLAGS.remainder)
    # The third kind, horovod, needs no TF_CONFIG: horovodrun tells its processes in other ways.
    if FLAGS.cluster in ('ring', 'ps') and not config:
        return ('--cluster=%s does not say which machines: set TF_CONFIG; on one machine, python '
                '-m towers.launch starts all processes' % FLAGS.cluster)
    return None


def _problem_without_cluster(config: str) -> typing.Optional[str]:
    """Describes what is wrong with `config`, the value of TF_CONFIG, in a run without --cluster;
    None if all is well.

    Machines of a cloud may have set it. Each task would then train a model of its own.
    """
    num_tasks = _num_tasks(config)
    if FLAGS.mode == 'train' and num_tasks > 1:
        return ('TF_CONFIG names %d tasks, and without --cluster each would train alone: give '
                '--cluster=ring or --cluster=ps, or unset TF_CONFIG' % num_tasks)
    return None


def _num_tasks(config: str) -> int:
    """The number of tasks that `TF_CONFIG` names; 0 where its text describes no cluster."""
    try:
        return sum(len(addresses) for addresses in json.loads(config)['cluster'].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


_FILES = ['imagenet', 'tfrecords', 'folder']  # data sets of image files
_STEPS = ['train', 'memory', 'find_rate']  # modes that run steps of a training
# Rows of a flag or option, another flag, and the values of the other flag with which the first has
# an effect: `('decay_power', 'decay', ['polynomial'])`, since --decay=polynomial alone has a power.
_GOES_WITH = [
    ('synchronous', 'cluster', ['ps']),
    ('start_timeout', 'cluster', CLUSTERS), ('dead_after', 'cluster', CLUSTERS),
    ('cluster', 'mode', ['train']), ('momentum', 'optimizer', ['momentum', 'rmsprop', 'lars']),
    ('decay_epochs', 'decay', DECAYS_OVER_EPOCHS), ('decay_rate', 'decay', DECAYS_BY_RATE),
    ('decay_power', 'decay', ['polynomial']), ('restart_growth', 'decay', ['cosine_restarts']),
    ('predictions', 'mode', ['predict']), ('diagnose_seconds', 'mode', ['diagnose']),
    ('background_class', 'dataset', ['tfrecords']),
    ('num_classes', 'dataset', ['tfrecords', 'synthetic']), ('augment', 'dataset', _FILES),
    ('unlabelled', 'dataset', _FILES), ('unlabelled', 'mode', ['predict']),
    ('bad_examples', 'dataset', _FILES),
    ('init_from', 'mode', ['train']), ('memory_plot', 'mode', ['memory']),
    ('confusion', 'mode', ['eval']), ('rate_plot', 'mode', ['find_rate']),
    ('rate_steps', 'mode', ['find_rate']), ('sweep', 'mode', ['train']),
    ('hooks', 'mode', ['train']),
    ('loss_scale', 'mode', _STEPS), ('xla', 'mode', _STEPS)]
# Flags and options that have no effect on a model function of the user's own.
_OF_NETWORKS_BY_NAME = {'weight_decay', 'aux_loss_weight', 'batch_norm_decay', 'label_smoothing',
                        'probabilities', 'confusion'}


def _problem_of_unused_flag(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a flag that was given, but has no effect with the value of another flag; None if
    all is well."""
    for flag, other, values in _GOES_WITH:
        if flag in given and FLAGS[other].value not in values:
            return '--%s is of no use with --%s=%s: it goes with %s' % (
                flag, other, FLAGS[other].value, ' or '.join(values))
    return None


def _problem_of_own_model(given: typing.Set[str]) -> typing.Optional[str]:
    """Describes a flag that was given, but has no effect on a model function of the user's own;
    None if all is well."""
    is_own_model = ':' in FLAGS.model  # module:function
    if not is_own_model:
        return None
    useless = _OF_NETWORKS_BY_NAME & given
    if FLAGS.optimizer in DECAYS_OF_WEIGHTS:  # the optimizer itself uses it
        useless.discard('weight_decay')
    if not useless:
        return None
    return '--%s is of no use with --model=%s: it goes with a network by name' % (
        min(useless), FLAGS.model)  # `min`, so that always the same one is named


_CHECKS = [_problem_of_numbers, _problem_of_towers, _problem_of_paths, _problem_of_length,
           _problem_of_rate, _problem_of_end, _problem_of_profile, _problem_of_automatic_batch,
           _problem_of_plan_only, _problem_of_diagnosis, _problem_of_hooks, _problem_of_outputs,
           _problem_of_sweep, _problem_of_cluster, _problem_of_unused_flag,
           _problem_of_own_model]  # in this order
