"""The flags of train.py, in groups."""

import collections
import os
import re

from absl import flags

from datasets import epochs, preprocessing
import towers

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
              'remainder', 'bad_examples', 'diagnose_seconds']),
    ('Towers', ['num_towers', 'devices', 'batch_size', 'accumulate', 'recompute', 'micro_batches',
                'schedule', 'reduction', 'variable_device', 'all_reduce',
                'shares', 'copies', 'update_ops', 'batch_norm', 'precision', 'loss_scale', 'xla']),
    ('Memory and threads', ['memory_limit', 'memory_plot', 'memory_fraction', 'allow_growth',
                            'intra_op_threads', 'inter_op_threads']),
    ('Several machines', ['cluster', 'worker_hosts', 'ps_hosts', 'job_name', 'task_index',
                          'synchronous', 'backup_workers', 'start_timeout', 'dead_after']),
    ('Optimizer', ['optimizer', 'momentum', 'clip_norm', 'base_learning_rate', 'base_batch_size',
                   'lr_scaling', 'warmup_epochs', 'decay', 'decay_epochs', 'decay_rate',
                   'average_decay']),
    ('The run', ['train_dir', 'train_steps', 'train_epochs', 'stop_at_accuracy', 'stop_after',
                 'eval_steps', 'save_steps', 'keep', 'keep_best', 'recover', 'seed',
                 'deterministic', 'check_numerics']),
    ('What is shown and written', ['log_every', 'summary_steps', 'profile_steps', 'fingerprint',
                                   'predictions',
                                   'export_dir', 'plan_only', 'audit_runtime'])])

# Flags that are paths.
PATHS = ('train_dir', 'data_dir', 'init_from', 'export_dir', 'predictions', 'memory_plot')

flags.DEFINE_enum('mode', 'train',
                  ['train', 'eval', 'predict', 'check_data', 'diagnose', 'memory'],
                  'train; or evaluate the newest checkpoint on the test set; or write its '
                  'predictions; or read the data once and list what is bad; or measure which side '
                  'holds training back, input or towers; or say where the memory of a training '
                  'step goes')
flags.DEFINE_string('model', 'digits', 'network by name; an unknown one lists those that exist; '
                    'or module:function, a model function of your own, (features, labels, mode)')
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
flags.DEFINE_enum('remainder', 'carry', epochs.REMAINDERS,
                  'the last batch of an epoch: filled with '
                  'the next epoch, dropped, padded by repetition, or short and weighted')
flags.DEFINE_string('bad_examples', '', 'file that lists the examples to leave out; '
                    '--mode=check_data writes it')
flags.DEFINE_float('diagnose_seconds', 5, 'for each of the measurements of --mode=diagnose',
                   lower_bound=0.1, upper_bound=3600)
flags.DEFINE_integer('image_size', 0, 'height and width in pixels; 0: what the network asks for, '
                     'and for --model=digits what the data set has',
                     lower_bound=0, upper_bound=MOST_PIXELS)
flags.DEFINE_float('weight_decay', 4e-5, 'factor of the L2 loss of the weights; of the decay of '
                   'lars and lamb, which have no L2 loss',
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
flags.DEFINE_enum('reduction', 'sum', ['sum', 'mean'], "gradient applied: the towers' sum, or that "
                  'of the mean loss of the whole batch')
flags.DEFINE_string('variable_device', '', "where variables live: a device, 'balanced', "
                    "'replicated' (a replica on every tower), or 'auto', which times steps of "
                    'each; empty: the CPU, or the GPU when there is just one')
flags.DEFINE_enum('all_reduce', 'copy', ['copy', 'collective', 'nccl'], 'how the gradients get to '
                  "every tower's replica, with --variable_device=replicated: added on one tower "
                  "each and sent to the others; by TF's ring; by NCCL (GPUs of one machine)")
flags.DEFINE_enum('copies', 'clone', ['clone', 'reuse'], 'towers after the first: copies of the '
                  'graph of one call of the model, or a call each')
flags.DEFINE_list('shares', [], "proportions of the towers' parts of a batch, a whole number a "
                  'tower, such as 3,1 for a device that is three times as fast; empty: equal parts')
flags.DEFINE_enum('update_ops', 'first', ['first', 'all', 'none'],
                  "towers whose batch-norm updates run with a step")
flags.DEFINE_enum('batch_norm', 'shard', ['shard', 'sync'], 'batch norm normalizes by the '
                  "statistics of a tower's shard, or of the whole batch")
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
flags.DEFINE_string('memory_plot', '', 'picture that --mode=memory writes, a PNG, which needs '
                    'matplotlib; empty: none')
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

flags.DEFINE_enum('optimizer', 'adam', ['sgd', 'momentum', 'adam', 'rmsprop', 'lars', 'lamb'],
                  'update rule')
flags.DEFINE_float('momentum', 0.9, 'for momentum, rmsprop and lars', lower_bound=0, upper_bound=1)
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
flags.DEFINE_integer('stop_after', 0, 'stop after that many evaluations without a better one than '
                     'the best, by --keep_best; 0: never', lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_integer('eval_steps', 0, 'steps from one evaluation to the next; 0: at the end only',
                     lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_integer('save_steps', 500, 'steps from one checkpoint to the next',
                     lower_bound=1, upper_bound=MOST_STEPS)
flags.DEFINE_integer('keep', 5, 'how many of the newest checkpoints to keep',
                     lower_bound=1, upper_bound=MOST_CHECKPOINTS)
flags.DEFINE_string('keep_best', '', 'metric whose best checkpoint is kept, in a folder best beside '
                    "the newest ones: the largest, of loss and of '-perplexity' the smallest")
flags.DEFINE_boolean('recover', False, 'when the newest checkpoint is damaged, go on from the one '
                     'before it')
flags.DEFINE_integer('seed', 1, 'of the initial weights, the data order, shifts and dropout',
                     lower_bound=0, upper_bound=2 ** 31 - 1)
flags.DEFINE_boolean('deterministic', False, 'the same bits in each run on GPUs, too, where '
                     'TensorFlow has kernels for that; slower, and without input wait')
flags.DEFINE_boolean('check_numerics', True, 'stop at the first NaN or infinity in a loss or a '
                     'gradient')

flags.DEFINE_integer('log_every', 100, 'steps from one line of metrics.jsonl to the next, and of '
                     'the screen where it is no terminal', lower_bound=1, upper_bound=MOST_STEPS)
flags.DEFINE_integer('summary_steps', 100, 'steps from one TensorBoard summary to the next; 0: '
                     'none', lower_bound=0, upper_bound=MOST_STEPS)
flags.DEFINE_string('profile_steps', '', "two steps, '100,105': a Chrome trace of the first one, "
                    "and TensorBoard's profile of those after it, up to the second")
flags.DEFINE_boolean('fingerprint', False, 'write checksums of the initial weights and of the '
                     'examples seen to metrics.jsonl, to compare runs by')
flags.DEFINE_string('predictions', 'predictions.csv', 'file that --mode=predict writes, a row an '
                    'example')
flags.DEFINE_string('export_dir', '', 'write a SavedModel of the final weights below this folder')
flags.DEFINE_boolean('plan_only', False, 'build the graph, print the plan and the audit, and stop')
flags.DEFINE_boolean('audit_runtime', False, 'also check what the runtime really places, with the '
                     'first step')


def train_dir():
    """The folder of the run."""
    return FLAGS.train_dir or os.path.join('runs', FLAGS.model.replace(':', '.'))
