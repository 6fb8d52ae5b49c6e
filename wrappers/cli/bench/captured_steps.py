"""Training steps that benchmarks capture without running them."""

from __future__ import annotations

from nntask.config import TrainSettings, resolve
from nntask.hardware import devices_of
from nntask.models import ModelConfig
from nntask.planning import capture
from scheduler.machine import StepPlan

from ..options.sources import model_config


def captured(settings: TrainSettings, config: ModelConfig | None = None) -> StepPlan:
    """Return the step that `nntask train` would record with these settings.

    Args:
        settings: settings of the run.
        config: config of the model; None for the preset that the settings name.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    config = model_config(settings) if config is None else config
    return capture(resolve(settings, config, machine=devices_of(settings.resources, settings.model.dtype, checks=False))).plan
