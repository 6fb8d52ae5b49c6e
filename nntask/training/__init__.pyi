from .autotune import measure
from .compare import Comparison, run_side_by_side
from .initial_weights import model_to_start_from
from .preflight import check_disk, check_start, check_tier_directory, warn_of_disk
from .run import AroundTraining, train, train_untiled
from .run_directory import CONFIG, MACHINE, METRICS, NODES, PLAN, SUMMARY, machine_of, newest_run, write_machine, write_plan
from .session import Opened, Session
from .signals import SIGNALS, Interrupts

__all__ = [
    "CONFIG",
    "MACHINE",
    "METRICS",
    "NODES",
    "PLAN",
    "SIGNALS",
    "SUMMARY",
    "AroundTraining",
    "Comparison",
    "Interrupts",
    "Opened",
    "Session",
    "check_disk",
    "check_start",
    "check_tier_directory",
    "machine_of",
    "measure",
    "model_to_start_from",
    "newest_run",
    "run_side_by_side",
    "train",
    "train_untiled",
    "warn_of_disk",
    "write_machine",
    "write_plan",
]
