"""Data-parallel training of TF1-style graphs on several devices: one model function, N towers.

    built = towers.build_towers(model_fn, (images, labels), optimizer, devices=2)
    print(built.plan)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(built.train_op)

Importing this package changes nothing in the program that imports it.
"""

from towers.api.build import build_towers
from towers.api.built import BuiltTowers, Plan, PlannedTower
from towers.api.options import Memory, Numerics, Objective, Pipeline, VariablePlacement
from towers.capture.model_inputs import BatchAxis
from towers.checkpoint.newest import Damaged, Newest, newest_checkpoint
from towers.checkpoint.match import InitialValues, check_fits, init_from
from towers.checkpoint.tidy import tidy_directory
from towers.cluster.addresses import free_ports
from towers.cluster.cluster import Cluster
from towers.cluster.member import Member, join
from towers.cluster.servers import serve
from towers.cluster.sessions import StopTogetherHook
from towers.cluster.worker_step import Feed, until_all_end
from towers.errors import (AuditError, BadFileError, CheckpointError, CloneError, ClusterError,
                           DeviceError, FailedBuildError, GradientError, InputError,
                           InvalidArgumentError, LogFileError, MeasurementError,
                           MissingPackageError, ModelFunctionError, NameScopeError,
                           NonFiniteError, OutOfMemoryError, PrecisionError, RunLockedError,
                           SharedVariableError, StepError, TowersError, WorkerLostError)
from towers.fronts.estimator import TowerOptimizer, replicate_model_fn
from towers.fronts.keras_model import ParallelModel
from towers.graph.waits import Wait
from towers.inspect.audit import Audit, Transfers, audit
from towers.inspect.check import TowersReport, check_towers
from towers.inspect.comparison import Difference, LeftOut
from towers.memory.account import memory_account
from towers.memory.account_table import DeviceAccount, HeldTensor, MemoryAccount
from towers.memory.fit import FittedBatch, fit_batch_size, largest_batch
from towers.memory.measure import MeasuredMemory, measure_memory
from towers.memory.out_of_memory import out_of_memory_explained
from towers.memory.report import memory_report
from towers.placement.devices import Devices, resolve_devices, visible_gpus
from towers.placement.session_config import session_config
from towers.placement.numerics import PRECISIONS, use_precision
from towers.placement.stages import stage
from towers.placement.variable_device import Placement
from towers.reduce.combination import combine_gradients
from towers.reduce.loss_scale import LossScale, WatchedLosses
from towers.reduce.replicas import Replicas
from towers.roles.variable_roles import VariableRole
from towers.report.hook import StepReportHook
from towers.report.step_report import StepReport, step_report
from towers.run.checkpoint_hook import CheckpointHook
from towers.run.evaluation import Evaluation
from towers.run.evaluation_hook import EvaluationHook
from towers.run.learning_rate import LearningRate, scale_learning_rate
from towers.run.stopping import StopOnSignalHook
from towers.run.summaries import SummaryHook, default_summaries
from towers.run.training_session import hold_directory, training_session
from towers.run.weights import WeightAverages, export_saved_model
from towers.slim_mend import mend_slim
from towers.whole_batch.batch_values import batch_concat, batch_mean, batch_sum
from towers.shards.cut_inputs import Shards, StagedInputs, staged
from towers.model.outputs import ModelOutput
from towers.shards.cut_batch import CutBatch, split_batch
from towers.gradients.tower import Tower

__version__ = '1.0.0'
