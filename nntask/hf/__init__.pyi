from .model_directory import attach_weights, read_config, weight_ranges

__all__ = ["attach_weights", "read_config", "weight_ranges"]
