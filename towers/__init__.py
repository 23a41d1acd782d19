"""Data-parallel training of TF1-style graphs on several devices: one model function, N towers.

    built = towers.build_towers(model_fn, (images, labels), optimizer, devices=2)
    print(built.plan)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(built.train_op)

Importing this package changes nothing in the program that imports it.
"""

from towers.audit import Audit, audit
from towers.averages import WeightAverages
from towers.build import BuiltTowers, build_towers
from towers.checkpoint_files import newest_checkpoint
from towers.checkpoint_hook import CheckpointHook
from towers.checkpoint_match import check_fits, init_from
from towers.checkpoint_tidy import tidy_directory
from towers.check import TowersReport, check_towers
from towers.choose_placement import choose_variable_device, placement_candidates
from towers.combination import combine_gradients
from towers.compat import mend_slim
from towers.devices import resolve_devices, session_config, visible_gpus
from towers.errors import (AuditError, CheckpointError, CloneError, DeviceError, GradientError,
                           InputError, InvalidArgumentError, LogFileError, ModelFunctionError,
                           NameScopeError, PrecisionError, RunLockedError, SharedVariableError,
                           TowersError)
from towers.evaluation import Evaluation, EvaluationHook
from towers.export import export_saved_model
from towers.learning_rate import LearningRate, scale_learning_rate
from towers.loss_scale import LossScale
from towers.metrics_log import MetricsHook
from towers.nonfinite import NonFiniteError
from towers.outputs import ModelOutput
from towers.plan import Plan
from towers.precision import PRECISIONS, use_precision
from towers.progress import ProgressHook
from towers.run_lock import hold_directory
from towers.shards import split_batch
from towers.stopping import StopOnSignalHook
from towers.summaries import SummaryHook, default_summaries
from towers.tower import Tower
from towers.training_session import training_session

__version__ = '0.1.0'
