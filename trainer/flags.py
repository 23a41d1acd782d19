"""The flags of train.py: their definitions, contradictions, and the objects that they describe."""

import collections
import json
import math
import os
import re
import sys
import textwrap

from absl import flags
import tensorflow.compat.v1 as tf

from datasets import epochs, preprocessing
import towers
from towers.run.run_settings import CHANGES, HARMLESS, STATE

FLAGS = flags.FLAGS

# Upper bounds of flags. A larger number is a typing error, which TensorFlow would answer with a
# traceback of its own, or with endless work. Steps times examples a step fit into an int64, and a
# float into a float32.
MOST_PIXELS = 4096
MOST_TOWERS = 10000
MOST_EXAMPLES = 10 ** 6
MOST_STEPS = 10 ** 12
MOST_EPOCHS = 10 ** 6
MOST_CHECKPOINTS = 10 ** 6
MOST_FLOAT = 3e38

# Groups of flags, in the order in which --helpshort shows them.
GROUPS = collections.OrderedDict([
    ('What is trained', ['mode', 'model', 'image_size', 'weight_decay', 'aux_loss_weight',
                         'batch_norm_decay', 'init_from']),
    ('Data', ['dataset', 'data_dir', 'num_classes', 'background_class', 'augment', 'augment_shift',
              'convert_colors', 'remainder', 'skip_bad', 'stage_inputs', 'diagnose_seconds']),
    ('Towers', ['num_towers', 'devices', 'batch_size', 'accumulate', 'recompute', 'micro_batches',
                'schedule', 'stages', 'reduction', 'variable_device', 'all_reduce',
                'copies', 'update_ops', 'precision', 'loss_scale', 'xla']),
    ('Memory and threads', ['memory_limit', 'memory_plot', 'memory_fraction', 'allow_growth',
                            'intra_op_threads', 'inter_op_threads']),
    ('Several machines', ['cluster', 'worker_hosts', 'ps_hosts', 'job_name', 'task_index',
                          'synchronous', 'backup_workers', 'start_timeout', 'dead_after']),
    ('Optimizer', ['optimizer', 'momentum', 'clip_norm', 'base_learning_rate', 'base_batch_size',
                   'lr_scaling', 'warmup_epochs', 'decay', 'decay_epochs', 'decay_rate',
                   'average_decay']),
    ('The run', ['train_dir', 'train_steps', 'train_epochs', 'stop_at_accuracy', 'eval_steps',
                 'save_steps', 'keep', 'recover', 'seed', 'check_numerics']),
    ('What is shown and written', ['log_every', 'summary_steps', 'fingerprint', 'predictions',
                                   'export_dir', 'plan_only', 'audit_runtime'])])

flags.DEFINE_enum('mode', 'train',
                  ['train', 'eval', 'predict', 'check_data', 'diagnose', 'memory'],
                  'train; or evaluate the newest checkpoint on the test set; or write its '
                  'predictions; or read the data once and list what is bad; or measure which side '
                  'holds training back, input or towers; or say where the memory of a training '
                  'step goes')
flags.DEFINE_string('model', 'digits', 'network by name; an unknown one lists those that exist')
flags.DEFINE_string('dataset', 'digits', 'data set by name; an unknown one lists those that exist; '
                    'or module:function, a tf.data pipeline of your own')
flags.DEFINE_string('data_dir', '', 'folder of the data set, for one that is not part of this')
flags.DEFINE_integer('num_classes', 0, 'classes of tfrecords, where 0 is as many as labels.txt '
                     'in --data_dir lists, and of synthetic images, where 0 is 1000', lower_bound=0,
                     upper_bound=MOST_EXAMPLES)
flags.DEFINE_boolean('background_class', False, 'labels of tfrecords begin at 1, and 0 is a class '
                     'more')
flags.DEFINE_enum('augment', 'inception', preprocessing.AUGMENTS, 'of images in files: cut out at '
                  'random, mirrored, colours distorted; or without the colours; or the centre of '
                  'each')
flags.DEFINE_boolean('convert_colors', False, 'take gray, CMYK and transparent images as the '
                     'decoder makes them RGB, instead of as bad ones')
flags.DEFINE_enum('remainder', 'carry', epochs.REMAINDERS,
                  'the last batch of an epoch: filled with '
                  'the next epoch, dropped, padded by repetition, or short and weighted')
flags.DEFINE_integer('skip_bad', 0, 'how many bad examples to leave out; with the next one the run '
                     'ends', lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_boolean('stage_inputs', False, "put each tower's next shard on its device while it "
                     'works on this one')
flags.DEFINE_float('diagnose_seconds', 5, 'for each of the measurements of --mode=diagnose',
                   lower_bound=0.1, upper_bound=3600)
flags.DEFINE_integer('image_size', 0, 'height and width in pixels; 0: what the network asks for, '
                     'and for --model=digits what the data set has',
                     lower_bound=0, upper_bound=MOST_PIXELS)
flags.DEFINE_float('weight_decay', 4e-5, 'factor of the L2 loss of the weights',
                   lower_bound=0, upper_bound=MOST_FLOAT)
flags.DEFINE_float('aux_loss_weight', 0.4, 'factor of the loss of auxiliary logits, for networks '
                   'that have them; 0 builds none', lower_bound=0, upper_bound=MOST_FLOAT)
flags.DEFINE_float('batch_norm_decay', -1, "of batch norm's moving averages; -1: what the network "
                   'asks for', lower_bound=-1, upper_bound=1)
flags.DEFINE_integer('augment_shift', 0, 'pixels by which training images are shifted at random, '
                     'at most, before they are resized', lower_bound=0, upper_bound=MOST_PIXELS)
flags.DEFINE_string('init_from', '', 'checkpoint whose weights to start from, as far as they fit')

flags.DEFINE_integer('num_towers', 2, 'how many towers, one a device: GPUs where there are '
                     'any, else virtual CPUs', lower_bound=1, upper_bound=MOST_TOWERS)
flags.DEFINE_string('devices', '', "the towers' devices by name, instead of --num_towers: "
                    "'/gpu:0,/gpu:2'")


class _BatchSizeParser(flags.IntegerParser):
    """A whole number, or 'auto'."""

    def parse(self, argument):
        try:
            return argument if argument == 'auto' else super(_BatchSizeParser, self).parse(argument)
        except ValueError as error:
            raise ValueError(str(error) if self._is_number(argument) else
                             "expected a whole number, or 'auto'")

    @staticmethod
    def _is_number(argument):
        return re.match(r'[+-]?\d+$', str(argument)) is not None


flags.DEFINE(_BatchSizeParser(lower_bound=1, upper_bound=MOST_EXAMPLES), 'batch_size', 100,
             "examples a step, over all towers together; 'auto': the most that --memory_limit "
             "holds",
             serializer=flags.ArgumentSerializer())
flags.DEFINE_integer('accumulate', 1, "micro-batches that each tower's share of the batch is cut "
                     'into: one after the other in the memory of one, for one update',
                     lower_bound=1, upper_bound=MOST_TOWERS)
flags.DEFINE_string('recompute', '', "'auto': the backward pass computes the forward pass again, "
                    'instead of keeping it; or names of operations or scopes, with commas, that '
                    'are kept')
flags.DEFINE_integer('micro_batches', 1, 'micro-batches that go through the stages of a tower of '
                     "several devices, '/gpu:0+/gpu:1', one behind the other",
                     lower_bound=1, upper_bound=MOST_TOWERS)
flags.DEFINE_enum('schedule', 'one_forward_one_backward',
                  ['one_forward_one_backward', 'all_forward'], 'of the micro-batches in a stage')
flags.DEFINE_enum('stages', 'auto', ['auto', 'time', 'both'], 'how the network is cut into as many '
                  "stages as a tower has devices: 'auto' of as much memory each; 'time' of as much "
                  "time each, measured in some steps before the first run; 'both'")
flags.DEFINE_enum('reduction', 'sum', ['sum', 'mean'], "gradient applied: the towers' sum, or that "
                  'of the mean loss of the whole batch')
flags.DEFINE_string('variable_device', '', "where variables live: a device, 'balanced', "
                    "'replicated' (a replica on every tower), or 'auto', which times steps of "
                    'each; empty: the CPU, or the GPU when there is just one')
flags.DEFINE_enum('all_reduce', 'copy', ['copy', 'collective', 'nccl'], 'how the gradients get to '
                  "every tower's replica, with --variable_device=replicated: added on one tower "
                  "each and sent to the others; by TF's ring; by NCCL (GPUs of one machine)")
flags.DEFINE_enum('copies', 'auto', ['auto', 'clone', 'reuse'], 'towers after the first: clones of '
                  'its graph, a call of the model each, or clones where that gives the same')
flags.DEFINE_enum('update_ops', 'first', ['first', 'all', 'none'],
                  "towers whose batch-norm updates run with a step")
flags.DEFINE_enum('precision', 'float32', towers.PRECISIONS, "of products and convolutions, by "
                  "TensorFlow's own graph rewrite: bf16 for CPUs, fp16 for GPUs, which scales the "
                  'loss')
flags.DEFINE_boolean('xla', False, "compile each tower's forward and backward pass; takes long to "
                     'start, and on CPUs was slower in every model measured')
flags.DEFINE_float('loss_scale', 0, 'first factor of the loss, halved and the step skipped when a '
                   'gradient overflows; 0: 32768 with fp16, else none',
                   lower_bound=0, upper_bound=MOST_FLOAT)

flags.DEFINE_float('memory_limit', 0, "MB of a GPU, or of all CPUs together, for "
                   "--batch_size=auto and --mode=memory; 0: what there are",
                   lower_bound=0, upper_bound=MOST_FLOAT)
flags.DEFINE_string('memory_plot', 'memory.png', 'picture that --mode=memory writes; empty: none')
flags.DEFINE_float('memory_fraction', 0, 'the most of each GPU\'s memory that is taken; 0: all',
                   lower_bound=0, upper_bound=1)
flags.DEFINE_boolean('allow_growth', True, 'take memory of a GPU as it is needed, not all at once')
flags.DEFINE_integer('intra_op_threads', -1, 'threads of one operation; 0: as TensorFlow chooses; '
                     "-1: OMP_NUM_THREADS, or the cores divided among CPU towers",
                     lower_bound=-1, upper_bound=MOST_TOWERS)
flags.DEFINE_integer('inter_op_threads', 0, 'operations that run at once on CPUs; 0: as TensorFlow '
                     'chooses', lower_bound=0, upper_bound=MOST_TOWERS)

flags.DEFINE_enum('cluster', '', ['', 'ring', 'ps', 'horovod'], "train on several machines, by "
                  "TensorFlow's ring, its parameter servers, or Horovod; each machine has "
                  '--num_towers towers and batches of --batch_size. Which machines, TF_CONFIG says')
flags.DEFINE_string('worker_hosts', '', "host:port of the workers, the chief first, instead of "
                    "TF_CONFIG's")
flags.DEFINE_string('ps_hosts', '', "host:port of the parameter servers, instead of TF_CONFIG's")
flags.DEFINE_enum('job_name', '', ['', 'chief', 'worker', 'ps', 'evaluator'], 'what this process '
                  "is, instead of TF_CONFIG's task")
flags.DEFINE_integer('task_index', -1, 'its number, from 0, in --worker_hosts, --ps_hosts, or the '
                     "list of --job_name in TF_CONFIG; -1: that of TF_CONFIG's task",
                     lower_bound=-1, upper_bound=MOST_TOWERS)
flags.DEFINE_boolean('synchronous', True, 'with --cluster=ps, whether a step waits for all workers')
flags.DEFINE_integer('backup_workers', 0, 'with --cluster=ps, how many workers a step does not '
                     'wait for', lower_bound=0, upper_bound=MOST_TOWERS)
flags.DEFINE_float('start_timeout', 120, 'seconds to wait for the other machines at the start',
                   lower_bound=0.1, upper_bound=MOST_FLOAT)
flags.DEFINE_float('dead_after', 30, 'seconds without a sign of life after which another worker of '
                   'a ring is gone', lower_bound=0.5, upper_bound=MOST_FLOAT)

flags.DEFINE_enum('optimizer', 'adam', ['sgd', 'momentum', 'adam', 'rmsprop'], 'update rule')
flags.DEFINE_float('momentum', 0.9, 'for momentum and rmsprop', lower_bound=0, upper_bound=1)
flags.DEFINE_float('clip_norm', 0, 'largest global norm of the combined gradient; 0: no clipping',
                   lower_bound=0, upper_bound=MOST_FLOAT)
flags.DEFINE_float('base_learning_rate', 0.001, 'learning rate of one tower',
                   lower_bound=0, upper_bound=MOST_FLOAT)
flags.DEFINE_integer('base_batch_size', 0, 'batch that --base_learning_rate is meant for; 0: that '
                     'of one tower', lower_bound=0, upper_bound=MOST_EXAMPLES)
flags.DEFINE_enum('lr_scaling', 'none', ['none', 'sqrt', 'linear'],
                  'how the rate grows with the batch, hence with the number of towers')
flags.DEFINE_float('warmup_epochs', 0, 'epochs over which the rate rises to its full value',
                   lower_bound=0, upper_bound=MOST_EPOCHS)
flags.DEFINE_enum('decay', 'none', ['none', 'exponential', 'cosine'], 'how the rate falls')
flags.DEFINE_float('decay_epochs', 0, 'epochs for one factor of --decay_rate (exponential), or '
                   'until the rate is 0 (cosine; 0: the whole run)',
                   lower_bound=0, upper_bound=MOST_EPOCHS)
flags.DEFINE_float('decay_rate', 0.94, 'factor of the exponential decay', lower_bound=0,
                   upper_bound=1)

flags.DEFINE_float('average_decay', 0, 'keep moving averages of the weights with this decay, and '
                   'evaluate and export them; 0: none', lower_bound=0, upper_bound=1)

flags.DEFINE_string('train_dir', '', "folder of the checkpoints, 'runs/<model>' if empty; a run "
                    'that is there already goes on')
flags.DEFINE_integer('train_steps', 0, 'steps to train for; 0: by --train_epochs',
                     lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_float('train_epochs', 30, 'passes over the training set',
                   lower_bound=0, upper_bound=MOST_EPOCHS)
flags.DEFINE_float('stop_at_accuracy', 0, 'stop when the test accuracy is at least this; looked at '
                   'every --eval_steps', lower_bound=0, upper_bound=1)
flags.DEFINE_integer('eval_steps', 0, 'steps from one evaluation to the next; 0: at the end only',
                     lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_integer('save_steps', 500, 'steps from one checkpoint to the next',
                     lower_bound=1, upper_bound=MOST_STEPS)
flags.DEFINE_integer('keep', 5, 'how many of the newest checkpoints to keep',
                     lower_bound=1, upper_bound=MOST_CHECKPOINTS)
flags.DEFINE_boolean('recover', False, 'when the newest checkpoint is damaged, go on from the one '
                     'before it')
flags.DEFINE_integer('seed', 1, 'of the initial weights, the data order, shifts and dropout',
                     lower_bound=0, upper_bound=2 ** 31 - 1)
flags.DEFINE_boolean('check_numerics', True, 'stop at the first NaN or infinity in a loss or a '
                     'gradient')

flags.DEFINE_integer('log_every', 100, 'steps from one line of metrics.jsonl to the next, and of '
                     'the screen where it is no terminal', lower_bound=1, upper_bound=MOST_STEPS)
flags.DEFINE_integer('summary_steps', 100, 'steps from one TensorBoard summary to the next; 0: '
                     'none', lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_boolean('fingerprint', False, 'write checksums of the initial weights and of the '
                     'examples seen to metrics.jsonl, to compare runs by')
flags.DEFINE_string('predictions', 'predictions.csv', 'file that --mode=predict writes, a row an '
                    'image')
flags.DEFINE_string('export_dir', '', 'write a SavedModel of the final weights below this folder')
flags.DEFINE_boolean('plan_only', False, 'build the graph, print the plan and the audit, and stop')
flags.DEFINE_boolean('audit_runtime', False, 'also check what the runtime really places, with the '
                     'first step')


# ---- What flags describe -------------------------------------------------------------------------

def make_learning_rate(batch_size, num_towers, examples_per_epoch, last_example, workers=1):
    """The `LearningRate` of the flags.

    Args:
      batch_size: examples a step on each machine.
      num_towers: of each machine.
      examples_per_epoch: examples in one pass over the data.
      last_example: examples of the whole run, at which a cosine without --decay_epochs ends.
      workers: how many machines' gradients make one step.

    Raises:
      InvalidArgumentError: decay and batch flags that do not fit the data.
    """
    decay_examples = decay_rate = None
    if FLAGS.decay != 'none':
        decay_examples = int(FLAGS.decay_epochs * examples_per_epoch)
        if FLAGS.decay_epochs and not decay_examples:
            raise towers.InvalidArgumentError(
                '--decay_epochs=%g is less than one of the %d examples of an epoch: give more'
                % (FLAGS.decay_epochs, examples_per_epoch))
        decay_rate = FLAGS.decay_rate if FLAGS.decay == 'exponential' else None
        if FLAGS.decay == 'cosine' and not decay_examples:
            decay_examples = last_example
    base_batch_size = FLAGS.base_batch_size or batch_size // (
        num_towers * FLAGS.accumulate * FLAGS.micro_batches)
    if batch_size % base_batch_size:
        raise towers.InvalidArgumentError(
            '--batch_size=%d is no multiple of --base_batch_size=%d: give one of which it is'
            % (batch_size, base_batch_size))
    return towers.LearningRate(
        FLAGS.base_learning_rate, workers * batch_size // base_batch_size, FLAGS.lr_scaling,
        warmup_examples=int(FLAGS.warmup_epochs * examples_per_epoch), decay=FLAGS.decay,
        decay_examples=decay_examples, decay_rate=decay_rate)


def make_optimizer(learning_rate):
    """The `tf.train.Optimizer` of --optimizer."""
    return {'sgd': lambda: tf.train.GradientDescentOptimizer(learning_rate),
            'momentum': lambda: tf.train.MomentumOptimizer(learning_rate, FLAGS.momentum),
            'adam': lambda: tf.train.AdamOptimizer(learning_rate),
            'rmsprop': lambda: tf.train.RMSPropOptimizer(learning_rate, momentum=FLAGS.momentum),
            }[FLAGS.optimizer]()


def memory_options():
    """The arguments of `build_towers` about the memory of a tower: a dict."""
    recompute = FLAGS.recompute if FLAGS.recompute == 'auto' else [
        name for name in FLAGS.recompute.split(',') if name]
    return dict(accumulate=FLAGS.accumulate, recompute=recompute or None,
                micro_batches=FLAGS.micro_batches, schedule=FLAGS.schedule)


def make_loss_scale():
    """The `LossScale` of --loss_scale; None: the default one of the precision."""
    first = FLAGS.loss_scale
    if not first:
        return None
    return towers.LossScale(first, least=min(1., first), most=max(2. ** 24, first))


def memory_limit():
    """--memory_limit in bytes, an int; None: the memory that the devices have."""
    return int(FLAGS.memory_limit * 1e6) or None


def session_options():
    """The arguments of `towers.session_config` by the flags: a dict."""
    return {'allow_growth': FLAGS.allow_growth, 'memory_fraction': FLAGS.memory_fraction or None,
            'intra_op_threads': None if FLAGS.intra_op_threads < 0 else FLAGS.intra_op_threads,
            'inter_op_threads': FLAGS.inter_op_threads}


def clip(gradients):
    """`transform_gradients` of `build_towers`: scales the gradients to the global norm --clip_norm,
    if theirs is larger."""
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in gradients], FLAGS.clip_norm)
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, gradients)]


# ---- Runs that go on -----------------------------------------------------------------------------

# The kind of each flag in `RunSettings`: what another value of it means for a run that goes on.
RESUMING = collections.OrderedDict([
    # Not recorded: about this start of the program, not about the run.
    (None, ['mode', 'data_dir', 'skip_bad', 'stage_inputs', 'diagnose_seconds', 'init_from',
            'train_dir', 'recover', 'predictions', 'export_dir', 'plan_only', 'audit_runtime',
            'memory_limit', 'memory_plot', 'memory_fraction', 'allow_growth', 'intra_op_threads',
            'inter_op_threads', 'worker_hosts', 'ps_hosts', 'job_name', 'task_index',
            'start_timeout', 'dead_after']),
    (HARMLESS, ['copies', 'recompute', 'schedule', 'stages', 'train_steps', 'train_epochs',
                'stop_at_accuracy', 'eval_steps',
                'save_steps', 'keep', 'check_numerics', 'log_every', 'summary_steps']),
    (CHANGES, ['augment', 'convert_colors', 'remainder', 'weight_decay', 'batch_norm_decay',
               'augment_shift', 'num_towers', 'devices', 'batch_size', 'accumulate',
               'micro_batches', 'reduction', 'variable_device', 'all_reduce', 'update_ops', 'xla',
               'cluster', 'synchronous', 'backup_workers', 'momentum', 'clip_norm',
               'base_learning_rate', 'base_batch_size', 'lr_scaling', 'warmup_epochs', 'decay',
               'decay_epochs', 'decay_rate', 'seed']),
    # These add or remove variables of the checkpoints.
    (STATE, ['model', 'dataset', 'num_classes', 'background_class', 'image_size',
             'aux_loss_weight', 'precision', 'loss_scale', 'optimizer', 'average_decay',
             'fingerprint'])])


OF_WORKERS = ('number of workers', 'examples of all workers a step', 'learning rate of all workers')
"""Settings that are no flags: what another number of workers makes of batch and rate."""


class _Settings(towers.RunSettings):
    """The settings of a run, of which `OF_WORKERS` are recorded on one machine, too.

    A run that goes on with several machines, or comes from them, says all three. One that stays on
    one machine says by its flags what it has changed, and would say it twice.
    """

    def compare(self, directory):
        differences, problem = super(_Settings, self).compare(directory)
        if self._values.get(OF_WORKERS[0]) == 1 and OF_WORKERS[0] not in [
                each.name for each in differences]:
            differences = [each for each in differences if each.name not in OF_WORKERS]
        return differences, problem


def run_settings(batch_size, further=()):
    """The `RunSettings` of the flags, with the batch size in place of an 'auto'.

    Args:
      batch_size: an int.
      further: list of pairs of a name, with a space in it since it is no flag's, and a value that
        changes the run; some with a third, a text: what another value changes.
    """
    kinds = {name: kind for kind, names in RESUMING.items() for name in names}
    if FLAGS.decay == 'cosine' and not FLAGS.decay_epochs:  # the rate falls until the last step
        kinds.update(train_steps=CHANGES, train_epochs=CHANGES)
    names = [name for name in sum(GROUPS.values(), []) if kinds[name] is not None]
    return _Settings(
        [(name, batch_size if name == 'batch_size' else FLAGS[name].value) for name in names]
        + [each[:2] for each in further],
        dict({name: kinds[name] for name in names}, **{each[0]: CHANGES for each in further}),
        '--%s=%s',
        'Or begin another run in another --train_dir, which --init_from={directory} starts with '
        'what fits of the weights.', {each[0]: each[2] for each in further if len(each) > 2})


def file_options(batch_size, further=()):
    """The arguments of `training_session` about the files of the run: a dict.

    Args:
      batch_size, further: as for `run_settings`.
    """
    return {'save_steps': FLAGS.save_steps, 'keep': FLAGS.keep, 'recover': FLAGS.recover,
            'settings': run_settings(batch_size, further)}


def train_dir():
    """The folder of the run."""
    return FLAGS.train_dir or os.path.join('runs', FLAGS.model)


# ---- Flags that do not go together ---------------------------------------------------------------

def _may_hold_files(folder):
    """Whether a folder is there, or can be made below one that is, and can be written to."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def contradiction(given):
    """What is wrong about the flags together, a line; None if nothing is.

    Args:
      given: names of the flags that were given on the command line.
    """
    def only_with(flag, other, values):
        if flag in given and FLAGS[other].value not in values:
            return '--%s%s is of no use with --%s=%s: it goes with %s' % (
                'no' * (FLAGS[flag].value is False), flag, other, FLAGS[other].value,
                ' or '.join(values))
        return None
    for name in sum(GROUPS.values(), []):
        if isinstance(FLAGS[name].value, float) and not math.isfinite(FLAGS[name].value):
            return '--%s=%s: expected a finite number' % (name, FLAGS[name].value)
    if {'num_towers', 'devices'} <= given:
        return '--num_towers and --devices both say how many towers there are: give one'
    if {'train_steps', 'train_epochs'} <= given:
        return '--train_steps and --train_epochs both say how long to train: give one'
    if not FLAGS.train_steps and not FLAGS.train_epochs:
        return '--train_steps and --train_epochs are both 0: there is nothing to do'
    if FLAGS.mode == 'predict' and not FLAGS.predictions:
        return '--predictions is empty: name a file to write'
    if FLAGS.export_dir and not _may_hold_files(FLAGS.export_dir):
        return '--export_dir=%s cannot be written to: name a folder' % FLAGS.export_dir
    for name in ('train_dir', 'export_dir', 'init_from'):
        if any('\ud800' <= each <= '\udfff' for each in FLAGS[name].value):
            return ('--%s=%a is no UTF-8, and TensorFlow opens no other names: give another' % (
                name, FLAGS[name].value))
    if FLAGS.base_learning_rate <= 0:
        return '--base_learning_rate=%g: expected more than 0' % FLAGS.base_learning_rate
    if FLAGS.decay == 'exponential' and not FLAGS.decay_epochs:
        return '--decay=exponential needs --decay_epochs'
    if FLAGS.stop_at_accuracy and not FLAGS.eval_steps:
        return '--stop_at_accuracy is looked at when there is an evaluation: give --eval_steps'
    if FLAGS.batch_norm_decay < 0 and FLAGS.batch_norm_decay != -1:
        return '--batch_norm_decay=%g: expected 0 to 1, or -1' % FLAGS.batch_norm_decay
    if FLAGS.average_decay == 1:
        return '--average_decay=1 would never follow the weights: give less'
    if FLAGS.variable_device == 'auto' and (FLAGS.plan_only or FLAGS.mode != 'train'):
        return '--variable_device=auto times steps of training, and %s runs none' % (
            '--plan_only' if FLAGS.plan_only else '--mode=%s' % FLAGS.mode)
    if FLAGS.variable_device == 'auto' and FLAGS.batch_size == 'auto':
        return ('--variable_device=auto times steps of a batch, and --batch_size=auto finds the '
                'batch that fits with the variables in their place: give one of the two')
    if FLAGS.remainder == 'weight' and FLAGS.fingerprint:
        return '--fingerprint takes batches of one size: not --remainder=weight'
    if FLAGS.stages in ('time', 'both'):
        for has, other in ((FLAGS.plan_only, '--plan_only'), (FLAGS.cluster, '--cluster'),
                           (FLAGS.mode in ('memory', 'diagnose'), '--mode=' + FLAGS.mode),
                           (FLAGS.batch_size == 'auto', '--batch_size=auto')):
            if has:
                return ('--stages=%s times steps of training on one machine, before the run, and '
                        '%s does not go with that: give --stages=auto' % (FLAGS.stages, other))
    if FLAGS.batch_size == 'auto' and (FLAGS.plan_only or FLAGS.mode != 'train'):
        return '--batch_size=auto runs steps of training, and %s does not train: give a number' % (
            '--plan_only' if FLAGS.plan_only else '--mode=%s' % FLAGS.mode)
    if 'memory_limit' in given and FLAGS.batch_size != 'auto' and FLAGS.mode != 'memory':
        return '--memory_limit is of no use without --batch_size=auto or --mode=memory'
    if FLAGS.mode == 'memory' and FLAGS.plan_only:
        return '--mode=memory runs steps to measure them, and --plan_only runs nothing: give one'
    if FLAGS.mode in ('diagnose', 'check_data') and FLAGS.plan_only:
        return '--mode=%s makes no plan: leave out --plan_only' % FLAGS.mode
    if FLAGS.plan_only and FLAGS.export_dir:
        return '--plan_only runs nothing, so there is nothing for --export_dir to write'
    if FLAGS.plan_only and FLAGS.audit_runtime:
        return '--plan_only runs nothing, so there is nothing for --audit_runtime to check'
    if FLAGS.recompute and not FLAGS.recompute.strip(', '):
        return "--recompute=%s names nothing: give 'auto', or names" % FLAGS.recompute
    if FLAGS.cluster:
        for name, why in (('fingerprint', 'sums up the examples of one machine'),
                          ('audit_runtime', 'looks at the devices of one machine'),
                          ('skip_bad', 'leaves out the examples that one machine finds'),
                          ('stage_inputs', 'reads ahead of the steps of one machine')):
            if FLAGS[name].value:
                return '--%s %s, and --cluster has several: leave it out' % (name, why)
        if FLAGS.variable_device == 'auto':
            return '--variable_device=auto times steps of one machine: name a place, with --cluster'
        if FLAGS.batch_size == 'auto':
            return '--batch_size=auto runs steps of one machine: give a number, with --cluster'
        if FLAGS.remainder == 'weight':
            return ('--remainder=weight ends an epoch with a batch that may not do for all workers '
                    'of --cluster: choose another')
        if not FLAGS.synchronous and FLAGS.remainder != 'carry':
            return ('--remainder=%s needs steps that all workers take together, and with '
                    '--nosynchronous each takes its own' % FLAGS.remainder)
    for name in ('worker_hosts', 'ps_hosts', 'job_name', 'task_index', 'start_timeout',
                 'dead_after'):
        if name in given and not FLAGS.cluster and not (
                name == 'job_name' and FLAGS.job_name == 'evaluator'):  # of a run on one machine
            return '--%s is of no use without --cluster' % name
    if FLAGS.micro_batches > 1 and FLAGS.accumulate > 1:
        return ('--micro_batches=%d and --accumulate=%d: a pipeline adds up the gradients of its '
                'micro-batches, too: give --micro_batches=%d alone' % (
                    FLAGS.micro_batches, FLAGS.accumulate,
                    FLAGS.micro_batches * FLAGS.accumulate))
    if 'schedule' in given and FLAGS.micro_batches == 1:
        return '--schedule is of no use with --micro_batches=1: it orders several'
    return (only_with('synchronous', 'cluster', ['ps'])
            or only_with('backup_workers', 'cluster', ['ps'])
            or only_with('cluster', 'mode', ['train'])
            or only_with('momentum', 'optimizer', ['momentum', 'rmsprop'])
            or only_with('all_reduce', 'variable_device', ['replicated', 'auto'])
            or only_with('decay_epochs', 'decay', ['exponential', 'cosine'])
            or only_with('decay_rate', 'decay', ['exponential'])
            or only_with('predictions', 'mode', ['predict'])
            or only_with('diagnose_seconds', 'mode', ['diagnose'])
            or only_with('stage_inputs', 'mode', ['train', 'diagnose'])
            or only_with('background_class', 'dataset', ['tfrecords'])
            or only_with('num_classes', 'dataset', ['tfrecords', 'synthetic'])
            or only_with('augment', 'dataset', ['imagenet', 'tfrecords', 'folder'])
            or only_with('skip_bad', 'dataset', ['imagenet', 'tfrecords', 'folder'])
            or only_with('convert_colors', 'dataset', ['imagenet', 'tfrecords', 'folder'])
            or only_with('audit_runtime', 'mode', ['train'])
            or only_with('init_from', 'mode', ['train'])
            or only_with('memory_plot', 'mode', ['memory'])
            or only_with('loss_scale', 'mode', ['train', 'memory'])
            or only_with('xla', 'mode', ['train', 'memory'])
            or _unclear_machines())


def _unclear_machines():
    """What is wrong about --cluster and TF_CONFIG together, a line; None if nothing is."""
    config = os.environ.get('TF_CONFIG', '')
    if FLAGS.cluster in ('ring', 'ps') and not FLAGS.worker_hosts and not config:
        served = FLAGS.cluster == 'ps'
        if FLAGS.job_name == 'evaluator':
            return ('--cluster=%s does not say how many workers the run has, by which an evaluator '
                    'knows its last step: set TF_CONFIG, or give --worker_hosts%s as the run has; '
                    'beside a run on one machine leave --cluster out' % (
                        FLAGS.cluster, ' and --ps_hosts' * served))
        return ('--cluster=%s does not say which machines: set TF_CONFIG, or give --worker_hosts, '
                '%s--job_name and --task_index; on one machine, python -m towers.launch %sstarts '
                'all processes' % (FLAGS.cluster, '--ps_hosts, ' * served, '--ps=1 ' * served))
    if FLAGS.cluster == 'ps' and not FLAGS.ps_hosts and not config:
        return ('--cluster=ps does not say which parameter servers: give --ps_hosts, or '
                '--cluster=ring, which needs none')
    if FLAGS.mode == 'train' and not FLAGS.cluster and config:
        try:
            tasks = sum(len(addresses) for addresses in json.loads(config)['cluster'].values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # no TF_CONFIG of a cluster
        if tasks > 1:
            return ('TF_CONFIG names %d tasks, and without --cluster each would train alone: give '
                    '--cluster=ring or --cluster=ps, or unset TF_CONFIG' % tasks)
    return None


# Flags of the run around its steps, of what a step computes, and of the network on its devices.
_OF_THE_RUN = frozenset(
    'train_steps train_epochs stop_at_accuracy eval_steps save_steps keep log_every summary_steps '
    'fingerprint base_learning_rate base_batch_size lr_scaling warmup_epochs decay decay_epochs '
    'decay_rate'.split())
_OF_A_STEP = frozenset(
    'augment augment_shift remainder accumulate recompute micro_batches schedule reduction '
    'all_reduce update_ops optimizer momentum clip_norm average_decay check_numerics'.split())
_OF_A_NETWORK = frozenset(GROUPS['Towers'] + GROUPS['Memory and threads'] + GROUPS['Optimizer'] + [
    'model', 'image_size', 'weight_decay', 'aux_loss_weight', 'batch_norm_decay', 'seed',
    'check_numerics', 'augment_shift', 'recover', 'remainder', 'augment', 'export_dir'])
_WITHOUT_EFFECT = {'train': frozenset(), 'diagnose': _OF_THE_RUN | {'export_dir'},
                   'memory': _OF_THE_RUN | {'export_dir'},
                   'eval': _OF_THE_RUN | _OF_A_STEP, 'predict': _OF_THE_RUN | _OF_A_STEP,
                   'check_data': _OF_THE_RUN | _OF_A_STEP | _OF_A_NETWORK}


def without_effect():
    """Names of the flags on the command line that --mode ignores, a list in the order of the help.

    They are no error, so that a run can be evaluated with the flags that it was trained with.
    """
    return [name for name in sum(GROUPS.values(), [])
            if name in _WITHOUT_EFFECT[FLAGS.mode] and FLAGS[name].present]


# ---- The command line ----------------------------------------------------------------------------

def help_text(summary):
    """The text of --help: a summary, and all flags in groups, one or two lines each."""
    lines = [summary, '']
    for group, names in GROUPS.items():
        lines.append('%s:' % group)
        for name in names:
            default = FLAGS[name].default
            text = '%s (%s)' % (FLAGS[name].help, "''" if default == '' else default)
            lines += textwrap.wrap(text, 98, initial_indent='  --%-20s ' % name,
                                   subsequent_indent=' ' * 25)
    return '\n'.join(lines)


def parse_flags(argv, summary=''):
    """Parses flags as absl does; shows the help in groups, and errors in one line (status 2).

    Args:
      argv: list of strings, the program first.
      summary: first line of the help.

    Returns:
      The arguments that are no flags: the program alone.

    Raises:
      SystemExit: after the help, or an error.
    """
    if {'--help', '--helpshort', '-h', '-help', '-helpshort'} & set(argv[1:]):
        print(help_text(summary))
        sys.exit(0)
    try:
        rest = FLAGS(argv)
    except flags.Error as error:
        text = re.sub(r"invalid literal for int\(\) with base 10: .*", 'expected a whole number',
                      str(error))
        text = re.sub('could not convert string to float: .*', 'expected a number', text)
        refuse(re.sub(r"\('Non-boolean argument .*", 'expected true or false', text))
    if len(rest) > 1:
        refuse('%r is no flag: flags begin with --' % rest[1])
    wrong = contradiction({name for name in FLAGS if FLAGS[name].present})
    if wrong:
        refuse(wrong)
    return rest


# ---- Errors --------------------------------------------------------------------------------------

# Advice in errors of `towers` about arguments of calls (a pattern), and the same about flags.
_PHRASES = [
    (r',? or pass check_devices=False to build the graph for [^.]*', ', or see its plan with '
     '--plan_only'),
    (r'; or pass check_devices=False and a config with [^.]*', ''),
    (r',? or pass allow_repeated_devices=True[^.]*', ''),
    (r' \(recover=True\)| \(towers\.init_from\)', ''),
    (r" If only a scope in the names differs, pass a dict from names there to variables\.", ''),
    (r'create_aux_logits=False', '--aux_loss_weight=0'),
    (r"\brecompute=\['(.*?)'\]",
     lambda found: '--recompute=' + found.group(1).replace("', '", ',')),
    (r'\bgive a rank, from 0\b', 'give --task_index, from 0'),
    (r"\bname one under 'ps'", "name one by --ps_hosts, or under 'ps' of TF_CONFIG"),
    (r"\bpass workers=\['host:port', …\]", 'give --worker_hosts=host:port,…'),
    (r'\bworkers=\(\)', '--worker_hosts'),
    (r'\b(takes no|needs a) data_dir', r'\1 --data_dir'),
    (r"\bVariablePlacement\('([^']*)'\)", r'--variable_device=\1'),
    (r'\bname a variable_device\b', 'name a --variable_device')]
_ARGUMENT = re.compile(r"(?<![\w\-./])([a-z]\w*)=('[^']*'|[\w.+\-]*[\w+](?![\w/]))")


def in_flags(text):
    """The text of an error of `towers`, with flags in place of the arguments they stand for."""
    for pattern, instead in _PHRASES:
        text = re.sub(pattern, instead, text)

    def flag(found):
        name, value = found.groups()
        if name == 'devices' and not FLAGS['devices'].value:
            name = 'num_towers'
        name = 'cluster' if name == 'kind' else name
        if name not in sum(GROUPS.values(), []):
            return found.group(0)
        return '--%s=%s' % (name, value.strip("'"))
    return _ARGUMENT.sub(flag, text)


def refuse(reason):
    """Prints one line that says why the program does not start, and exits with status 2."""
    say(' '.join(str(reason).split()))
    sys.exit(2)


def say(reason):
    """Prints an error, or its text, as one line on standard error."""
    sys.stderr.write('train.py: %s\n' % ' '.join(in_flags(str(reason)).splitlines()))
