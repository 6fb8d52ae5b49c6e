from .cluster import ClusterSpec, check_plain, check_shared
from .disk import disk_of, has_size
from .environment import flags_from, unknown_variables, variables_listed
from .imaginary import BOUNDLESS, imaginary_machine, parse_devices
from .init_from import InitialModel, brings_config, initial_model
from .machine import devices_of, machine_of, request_of
from .objective import image_shape, with_head
from .old_settings import OLD_SETTINGS, instead, lost, replaced, translated
from .resolution import TINY, check_continued, resolve, resolve_untiled, sized
from .run_config import LanguageRun, OptimizerSpec, RunConfig
from .settings import (
    EXPERT,
    SUFFIXES,
    CheckpointSettings,
    MachineSettings,
    ModelSettings,
    ObserveSettings,
    OptimizerSettings,
    ResourceSettings,
    Suffix,
    TilingSettings,
    TrainSettings,
    flag_of,
    typed,
)
from .stored_run import stored_settings
from .tile_sizes import open_tiles, retiled
from .validation import check_most, check_prompt, check_values, checked_length, step_range

__all__ = [
    "BOUNDLESS",
    "EXPERT",
    "OLD_SETTINGS",
    "SUFFIXES",
    "TINY",
    "CheckpointSettings",
    "ClusterSpec",
    "InitialModel",
    "LanguageRun",
    "MachineSettings",
    "ModelSettings",
    "ObserveSettings",
    "OptimizerSettings",
    "OptimizerSpec",
    "ResourceSettings",
    "RunConfig",
    "Suffix",
    "TilingSettings",
    "TrainSettings",
    "brings_config",
    "check_continued",
    "check_most",
    "check_plain",
    "check_prompt",
    "check_shared",
    "check_values",
    "checked_length",
    "devices_of",
    "disk_of",
    "flag_of",
    "flags_from",
    "has_size",
    "image_shape",
    "imaginary_machine",
    "initial_model",
    "instead",
    "lost",
    "machine_of",
    "open_tiles",
    "parse_devices",
    "replaced",
    "request_of",
    "resolve",
    "resolve_untiled",
    "retiled",
    "sized",
    "step_range",
    "stored_settings",
    "translated",
    "typed",
    "unknown_variables",
    "variables_listed",
    "with_head",
]
