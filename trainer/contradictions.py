"""Flags and options that do not go together."""

import json
import math
import os

import tensorflow.compat.v1 as tf

from towers.cluster.cluster import KINDS
from towers.errors import reason_of
from trainer.flags import FLAGS, PATHS, SETTINGS, profiled_steps


def contradiction(given):
    """What is wrong about the flags together, a line; None if nothing is. `given` has the names of
    those that were given."""
    return next(filter(None, (check(given) for check in (
        _of_values, _of_the_run, _of_the_mode, _of_machines, _of_no_use))), None)


def _of_values(given):
    """A value that is none; or two flags for one thing."""
    for name in SETTINGS:
        if isinstance(FLAGS[name].value, float) and not math.isfinite(FLAGS[name].value):
            return '--%s=%s: expected a finite number' % (name, FLAGS[name].value)
    return _first([
        ({'num_towers', 'devices'} <= given,
         '--num_towers and --devices both say how many towers there are: give one'),
        (FLAGS.micro_batches > 1 and FLAGS.accumulate > 1,
         '--micro_batches=%d and --accumulate=%d: a pipeline adds up the gradients of its '
         'micro-batches, too: give --micro_batches=%d alone' % (
             FLAGS.micro_batches, FLAGS.accumulate, FLAGS.micro_batches * FLAGS.accumulate)),
        (FLAGS.recompute and not FLAGS.recompute.strip(', '),
         "--recompute=%s names nothing: give 'auto', or names" % FLAGS.recompute),
        (FLAGS.batch_norm_decay < 0 and FLAGS.batch_norm_decay != -1,
         '--batch_norm_decay=%g: expected 0 to 1, or -1' % FLAGS.batch_norm_decay),
        (FLAGS.mode == 'predict' and not FLAGS.predictions,
         '--predictions is empty: name a file to write')]) or next(
             filter(None, map(_of_a_path, PATHS)), None)


def _of_a_path(name):
    """What is wrong about the path of a flag."""
    path, remote = FLAGS[name].value, '://' in FLAGS[name].value
    if '\0' in path:
        return '--%s=%a has a NUL in it, as no path has: give another' % (name, path)
    if name in ('train_dir', 'export_dir', 'init_from') and any(
            '\ud800' <= each <= '\udfff' for each in path):
        return '--%s=%a is no UTF-8, and TensorFlow opens no other names: give another' % (
            name, path)
    if remote and not (name in ('export_dir', 'init_from')
                       or name == 'data_dir' and ':' in FLAGS.dataset):  # the user's own to read
        return ('--%s=%s is no path of this machine, and --init_from and --export_dir alone take '
                'others: give one, such as that where it is mounted' % (name, path))
    if remote and name != 'data_dir':
        try:
            tf.io.gfile.exists(path)
        except tf.errors.OpError as error:
            return '--%s=%s cannot be reached: %s' % (name, path, reason_of(error))
    elif name == 'export_dir' and path and not _may_hold_files(path):
        return '--export_dir=%s cannot be written to: name a folder' % path
    return None


def _may_hold_files(folder):
    """Whether a folder is there, or can be made below one that is, and can be written to."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def _of_the_run(given):
    """Of the learning rate, of averages, of the end of the run."""
    return _first([
        ({'train_steps', 'train_epochs'} <= given,
         '--train_steps and --train_epochs both say how long to train: give one'),
        (not FLAGS.train_steps and not FLAGS.train_epochs,
         '--train_steps and --train_epochs are both 0: there is nothing to do'),
        (FLAGS.base_learning_rate <= 0,
         '--base_learning_rate=%g: expected more than 0' % FLAGS.base_learning_rate),
        (FLAGS.decay == 'exponential' and not FLAGS.decay_epochs,
         '--decay=exponential needs --decay_epochs'),
        (FLAGS.optimizer == 'lars' and FLAGS.reduction == 'sum',
         '--optimizer=lars adds its decay to the gradient of the mean loss, and --reduction=sum '
         'multiplies that by the towers: give --reduction=mean'),
        (FLAGS.average_decay == 1, '--average_decay=1 would never follow the weights: give less'),
        (FLAGS.stop_at_accuracy and not FLAGS.eval_steps,
         '--stop_at_accuracy is looked at when there is an evaluation: give --eval_steps'),
        (FLAGS.stop_after and not (FLAGS.eval_steps and FLAGS.keep_best),
         '--stop_after counts evaluations by --keep_best: give --keep_best and --eval_steps'),
        (FLAGS.stop_after and FLAGS.stop_at_accuracy,
         '--stop_at_accuracy and --stop_after both say when to stop: give one'),
        (FLAGS.profile_steps and profiled_steps(FLAGS.profile_steps) is None,
         '--profile_steps=%s: expected two steps, the first one above 1 and below the second, such '
         'as 100,105' % FLAGS.profile_steps)])


def _first(cases):
    """The text of the first pair of a condition and a text whose condition holds; None of none."""
    return next((text for is_wrong, text in cases if is_wrong), None)


def _of_the_mode(given):
    """Of what runs no steps of training."""
    without_steps = ('--plan_only' if FLAGS.plan_only else '--mode=%s' % FLAGS.mode
                     if FLAGS.mode != 'train' else '--job_name=evaluator'
                     if FLAGS.job_name else None)
    return _first([
        (FLAGS.batch_size == 'auto' and without_steps,
         '--batch_size=auto is of training, and %s does not train: give a number' % without_steps),
        (FLAGS.mode in ('memory', 'diagnose', 'check_data') and FLAGS.plan_only,
         '--mode=%s makes no plan: leave out --plan_only' % FLAGS.mode),
        (FLAGS.plan_only and FLAGS.export_dir,
         '--plan_only runs nothing, so there is nothing for --export_dir to write'),
        (FLAGS.mode == 'diagnose' and FLAGS.deterministic,
         '--mode=diagnose tells the time in a step, which TensorFlow refuses with --deterministic: '
         'leave it out')])


def _of_machines(given):
    """Of --cluster, of what one machine alone can do, and of TF_CONFIG."""
    if FLAGS.job_name == 'evaluator':
        return None
    config = os.environ.get('TF_CONFIG', '')
    if FLAGS.cluster:
        if FLAGS.batch_size == 'auto':
            return '--batch_size=auto runs steps of one machine: give a number, with --cluster'
        if not FLAGS.synchronous and FLAGS.remainder != 'carry':
            return ('--remainder=%s needs steps that all workers take together, and '
                    'asynchronously each takes its own' % FLAGS.remainder)
    if FLAGS.cluster in ('ring', 'ps') and not config:
        return ('--cluster=%s does not say which machines: set TF_CONFIG; on one machine, python '
                '-m towers.launch starts all processes' % FLAGS.cluster)
    if FLAGS.mode == 'train' and not FLAGS.cluster and config:
        try:
            tasks = sum(len(addresses) for addresses in json.loads(config)['cluster'].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # no TF_CONFIG of a cluster
        if tasks > 1:
            return ('TF_CONFIG names %d tasks, and without --cluster each would train alone: give '
                    '--cluster=ring or --cluster=ps, or unset TF_CONFIG' % tasks)
    return None


_FILES, _STEPS = ['imagenet', 'tfrecords', 'folder'], ['train', 'memory']
_GOES_WITH = [  # a flag or option, and the values of a flag with which it is of use
    ('synchronous', 'cluster', ['ps']),
    ('start_timeout', 'cluster', KINDS), ('dead_after', 'cluster', KINDS),
    ('cluster', 'mode', ['train']), ('momentum', 'optimizer', ['momentum', 'rmsprop', 'lars']),
    ('decay_epochs', 'decay', ['exponential', 'cosine']), ('decay_rate', 'decay', ['exponential']),
    ('predictions', 'mode', ['predict']), ('diagnose_seconds', 'mode', ['diagnose']),
    ('background_class', 'dataset', ['tfrecords']),
    ('num_classes', 'dataset', ['tfrecords', 'synthetic']), ('augment', 'dataset', _FILES),
    ('unlabelled', 'dataset', _FILES), ('unlabelled', 'mode', ['predict']),
    ('bad_examples', 'dataset', _FILES),
    ('init_from', 'mode', ['train']), ('memory_plot', 'mode', ['memory']),
    ('loss_scale', 'mode', _STEPS), ('xla', 'mode', _STEPS)]
_OF_NETWORKS_BY_NAME = {'weight_decay', 'aux_loss_weight', 'batch_norm_decay', 'label_smoothing',
                        'probabilities'}


def _of_no_use(given):
    """A flag that was given, and has no effect with the value of another."""
    for flag, other, values in _GOES_WITH:
        if flag in given and FLAGS[other].value not in values:
            return '--%s is of no use with --%s=%s: it goes with %s' % (
                flag, other, FLAGS[other].value, ' or '.join(values))
    decays_itself = {'weight_decay'} if FLAGS.optimizer in ('lars', 'lamb') else set()
    of_networks = _OF_NETWORKS_BY_NAME & given - decays_itself if ':' in FLAGS.model else ()
    for flag in sorted(of_networks):
        return '--%s is of no use with --model=%s: it goes with a network by name' % (
            flag, FLAGS.model)
    return None
